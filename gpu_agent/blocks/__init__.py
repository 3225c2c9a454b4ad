"""The store beside an engine that schedules requests with block tables (vLLM): what to look up,
load and save.

lookups --> scheduler (groups: which blocks; save_plan: when) --> orders --> ranks: an agent per
group --> report
"""
