from services.api.serving.queries import NewestEvent, Pick, Picks, Query, Recommends

__all__ = ["NewestEvent", "Pick", "Picks", "Query", "Recommends"]
