class Type:
    def __call__(self, *arguments: Type) -> Type: ...

class Array(Type):
    def __init__(self, dtype: Type, ndim: int, layout: str, readonly: bool = ..., aligned: bool = ...) -> None: ...

void: Type
boolean: Type
int32: Type
int64: Type
uint8: Type
uint32: Type
uint64: Type
float32: Type
float64: Type
