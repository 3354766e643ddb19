"""Federated simulations as people run them: settings out of flags and files, evaluation, report and picture."""
