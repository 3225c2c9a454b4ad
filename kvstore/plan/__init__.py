"""How large a store should be: from a trace of requests to hit rates at every size, in one pass and without a node.

In: requests (`kvstore.measure.trace`), sizes, speeds. Out: a `Plan`. Pure, but for a model's description.
"""
