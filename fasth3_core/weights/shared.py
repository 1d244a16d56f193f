"""One copy of the same weights in a process."""

import threading
import weakref
from collections.abc import Callable, Hashable

from .store import FileStore

_STORES: weakref.WeakValueDictionary[Hashable, FileStore] = weakref.WeakValueDictionary()
_STORES_LOCK = threading.Lock()


def forget_idle(but: FileStore) -> None:
    """Let go of the host memory of every other store that is on no device."""
    with _STORES_LOCK:
        idle = [store for store in _STORES.values() if store is not but and store.location is None]
    for store in idle:
        store.forget()


def shared(key: Hashable, make: Callable[[], FileStore]) -> FileStore:
    """The store made for `key` as long as anybody holds it, else a new one: one copy of the same weights in memory."""
    with _STORES_LOCK:
        store = _STORES.get(key)
        if store is None:
            store = _STORES[key] = make()
        return store
