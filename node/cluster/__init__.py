"""Work with the other nodes of a cluster.

Input are the node's settings and the content of etcd; output is the view for clients and listeners.
"""
