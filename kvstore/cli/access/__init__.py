"""Commands about identities, tenants and their rights."""
