"""Obey what clients say about their pages' future.

Input are hints about pages of one namespace; output is an answer per page. Classes of eviction are
those of `node.memory.classes`; here are the sessions' records, and what is fetched ahead.
"""
