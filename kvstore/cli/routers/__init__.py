"""Commands for routers of requests: which blocks are stored, and who has a prompt's."""
