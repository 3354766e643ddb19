from services.datasets.federations.open import NAMES, open_federation

__all__ = ["NAMES", "open_federation"]
