"""Read the files that identify clients and nodes: certificates, identities and secrets."""
