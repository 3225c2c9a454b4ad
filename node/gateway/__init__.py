"""The public gRPC service, in processes of its own that the node starts and watches: `main` is such a process,
`server` and `upstream` are what it does, `supervisor` is the node's side."""
