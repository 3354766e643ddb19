"""Private set intersection: which ids parties have in common, and nothing of the others.

Protocols, each a role without I/O (``federated.vertical.parties``): ``ecdh`` (Diffie-Hellman), ``signatures`` (RSA
blind signatures), ``transfers`` (oblivious transfers), ``unbalanced`` (small against large), ``several`` (three and
more).
"""

from federated.psi.ids import IdRule, Ids, IdsRefused, normalise
from federated.psi.kind import KIND, PsiOptions
from federated.psi.terms import Found, Terms

__all__ = ["KIND", "Found", "IdRule", "Ids", "IdsRefused", "PsiOptions", "Terms", "normalise"]
