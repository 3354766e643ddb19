"""Federated rounds for real devices: servers over a shared store, a scheduler, and edge servers near the clients."""
