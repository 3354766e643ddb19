"""Joint inference: the guest's REST endpoint asks the hosts, and every party writes down what was asked."""
