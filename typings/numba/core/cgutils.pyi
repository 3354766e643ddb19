from llvmlite import ir

voidptr_t: ir.Type

def get_or_insert_function(module: ir.Module, fnty: ir.FunctionType, name: str) -> ir.Function: ...
