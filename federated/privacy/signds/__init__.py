"""SignDS (Jiang, Zhou and Grossklags 2022): a device names a few coordinates, and one sign for all of them."""

from federated.privacy.signds.mechanism import SignDS, reports_of
from federated.privacy.signds.plan import Plan, make_plan, plan_for
from federated.privacy.signds.report import SignReports

__all__ = ["Plan", "SignDS", "SignReports", "make_plan", "plan_for", "reports_of"]
