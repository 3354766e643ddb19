from typing import Any

class HistGradientBoostingClassifier:
    def __init__(self, **options: Any) -> None: ...
    def fit(self, X: Any, y: Any) -> HistGradientBoostingClassifier: ...  # noqa: N803
    def predict(self, X: Any) -> Any: ...  # noqa: N803
    def predict_proba(self, X: Any) -> Any: ...  # noqa: N803

class HistGradientBoostingRegressor:
    def __init__(self, **options: Any) -> None: ...
    def fit(self, X: Any, y: Any) -> HistGradientBoostingRegressor: ...  # noqa: N803
    def predict(self, X: Any) -> Any: ...  # noqa: N803
