from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

class Array:
    def __init__(self, array: npt.NDArray[Any]) -> None: ...
    def numpy(self) -> npt.NDArray[np.float32]: ...

class ArrayRecord:
    def __init__(self, arrays: Mapping[str, Array]) -> None: ...
    def __getitem__(self, name: str) -> Array: ...

class MetricRecord:
    def __init__(self, metrics: Mapping[str, float]) -> None: ...

class RecordDict:
    def __init__(self, records: Mapping[str, Any]) -> None: ...
    def __getitem__(self, name: str) -> Any: ...

class Context:
    node_config: Mapping[str, Any]

class Error:
    reason: str | None

class Message:
    content: RecordDict
    error: Error
    def __init__(self, *, content: RecordDict, reply_to: Message) -> None: ...
    def has_error(self) -> bool: ...
