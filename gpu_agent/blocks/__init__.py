"""Look up, load and save for an engine that schedules requests with block tables, such as vLLM.

lookups --> scheduler (groups: which blocks; save_plan: when) --> orders
orders --> ranks: an agent per shard --> report
"""
