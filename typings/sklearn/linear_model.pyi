from typing import Any

class LogisticRegression:
    def __init__(self, **options: Any) -> None: ...
    def fit(self, X: Any, y: Any) -> LogisticRegression: ...  # noqa: N803
    def predict(self, X: Any) -> Any: ...  # noqa: N803
    def predict_proba(self, X: Any) -> Any: ...  # noqa: N803

class Ridge:
    def __init__(self, **options: Any) -> None: ...
    def fit(self, X: Any, y: Any) -> Ridge: ...  # noqa: N803
    def predict(self, X: Any) -> Any: ...  # noqa: N803
