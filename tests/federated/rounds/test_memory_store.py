import pytest
from support.round_store_contract import StoreContract

from federated.rounds import MemoryStore


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
