"""Look up, load and save for an engine that schedules requests with block tables, such as vLLM.

in the engine's scheduler:   lookups --> scheduler --> orders     groups: which blocks,
                                             ^                    save_plan: when they are saved,
                                             |                    cost_model: hits that pay
on every rank:               backends <-- ranks <-- orders
                             (an agent per shard)
                                 report, back to the scheduler
"""
