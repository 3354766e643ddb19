"""Whether a device may let another private report leave: it believes no server on that."""

from __future__ import annotations

from federated.client_folder import DeviceFolder, LedgerUnreadable
from federated.client_steps import Done
from federated.privacy.budget import report_epsilon, terms_of
from federated.privacy.protection import Protection


def privacy_spent(job: str, protection: Protection, folder: DeviceFolder) -> Done | None:
    """The end, where another report would exceed this device's privacy budget, or cannot be added to those that
    have left: a server may say other terms than it did when they were promised."""
    section, most = protection.section, protection.most_reports
    try:
        ledger = folder.ledger()
    except LedgerUnreadable as error:
        return Done("budget", str(error))
    if ledger.reports and ledger.terms != terms_of(section):
        return Done(
            "budget",
            f"{ledger.reports} reports have left under other terms of privacy than job {job} has now: "
            "what all cost together is not known; a new job, or a new state folder, begins anew",
        )
    if most is None or ledger.reports < most:
        return None
    spent = report_epsilon(section, ledger.reports)
    return Done(
        "budget",
        f"{ledger.reports} reports have spent {spent:.4g} of the privacy budget {section.budget_epsilon:g}",
    )
