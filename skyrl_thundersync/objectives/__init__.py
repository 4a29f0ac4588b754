"""One file per objective, each a class that keeps the contract of contract.py; registry.py finds them, and a user's own."""
