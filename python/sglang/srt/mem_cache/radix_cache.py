"""Radix tree over page-sized pieces of key sequences; shares KV pages between requests.

A node holds a run of keys and the pages of those positions. A lock on a node counts on every node
up to the root. Unlocked leaves wait in a heap ordered by last use; an entry that has gone stale is
skipped when it surfaces, so an eviction costs O(log n) and never walks the tree. "Last use" is a
counter, not a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from sglang.srt.mem_cache.prefix_cache import CacheHandle, Insertion, PrefixMatch

HEAP_SLACK = 64


class TreeNode(CacheHandle):
    __slots__ = ("keys", "pages", "children", "parent", "locks", "last_use", "serial", "salt")

    def __init__(
        self, keys: np.ndarray, pages: list[int], parent: TreeNode | None, serial: int, salt: bytes
    ) -> None:
        self.keys = keys  # [len(pages) * page_size]
        self.pages = pages
        self.children: dict[bytes, TreeNode] = {}
        self.parent = parent  # None: the root, or a node that has been evicted
        self.locks = 0
        self.last_use = 0
        self.serial = serial  # breaks ties in the heap
        self.salt = salt  # part of what it is found by

    @property
    def is_evictable_leaf(self) -> bool:
        return self.parent is not None and not self.children and self.locks == 0


class RadixCache:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._serial = 0
        self._uses = 0
        self._start()

    def _start(self) -> None:
        self._root = self._new_node(np.empty(0, dtype=np.int64), [], None, b"")
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._num_nodes = 0
        self._num_pages = 0
        self._num_evictable = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable_pages(self) -> int:
        return self._num_evictable

    # ---- finding and holding -------------------------------------------------------------------

    def match(self, keys: np.ndarray, salt: bytes = b"") -> PrefixMatch:
        node, used, pages = self._walk(keys, salt)
        return PrefixMatch(pages=tuple(pages), node=node, num_node_pages=used)

    def lock(self, match: PrefixMatch) -> CacheHandle:
        assert isinstance(match.node, TreeNode)
        node = self._split(match.node, match.num_node_pages)
        self._lock(node)
        return node

    def unlock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, TreeNode)
        node: TreeNode | None = handle
        while node is not None:
            node.locks -= 1
            assert node.locks >= 0, "unlocked more often than locked"
            if node.locks == 0:
                self._num_evictable += len(node.pages)
                self._offer(node)
            node = node.parent

    def lock_again(self, handle: CacheHandle) -> None:
        assert isinstance(handle, TreeNode)
        self._lock(handle)

    def _lock(self, handle: TreeNode) -> None:
        self._uses += 1
        node: TreeNode | None = handle
        while node is not None:
            if node.locks == 0:
                self._num_evictable -= len(node.pages)
            node.locks += 1
            node.last_use = self._uses
            node = node.parent

    def _walk(self, keys: np.ndarray, salt: bytes) -> tuple[TreeNode, int, list[int]]:
        """The last node on the way of ``keys``, how many of its pages match, and all matched pages."""
        size = self.page_size
        node, used, pages, at = self._root, 0, [], 0
        while len(keys) - at >= size and used == len(node.pages):
            child = node.children.get(salt + keys[at : at + size].tobytes())
            if child is None:
                break
            node, used = child, self._num_common_pages(child.keys, keys[at:])
            pages += child.pages[:used]
            at += used * size
        return node, used, pages

    def _num_common_pages(self, a: np.ndarray, b: np.ndarray) -> int:
        length = min(len(a), len(b))
        different = np.flatnonzero(a[:length] != b[:length])
        return (int(different[0]) if len(different) else length) // self.page_size

    # ---- growing -------------------------------------------------------------------------------

    def insert(
        self, keys: np.ndarray, pages: Sequence[int], held: CacheHandle, salt: bytes = b""
    ) -> Insertion:
        count = len(keys) // self.page_size
        assert len(keys) == count * self.page_size and len(pages) == count, "whole pages only"
        node, used, known = self._walk(keys, salt)
        node = self._split(node, used)
        if len(known) < count:
            rest = len(known)
            node = self._add_leaf(node, keys[rest * self.page_size :], list(pages[rest:]), salt)
        self._lock(node)
        self.unlock(held)
        return Insertion(handle=node, first_adopted=len(known), end_adopted=count)

    def _add_leaf(self, parent: TreeNode, keys: np.ndarray, pages: list[int], salt: bytes) -> TreeNode:
        leaf = self._new_node(keys.copy(), pages, parent, salt)
        parent.children[self._edge(leaf)] = leaf
        self._num_nodes += 1
        self._num_pages += len(pages)
        self._num_evictable += len(pages)
        return leaf

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """The node that ends after ``num_pages`` of ``node``; handles to ``node`` keep their meaning.

        So ``node`` itself becomes the lower part, and the upper part is new.
        """
        if num_pages == len(node.pages):
            return node
        assert 0 < num_pages < len(node.pages) and node.parent is not None
        cut = num_pages * self.page_size
        upper = self._new_node(node.keys[:cut], node.pages[:num_pages], node.parent, node.salt)
        upper.locks, upper.last_use = node.locks, node.last_use
        node.parent.children[self._edge(node)] = upper
        node.keys, node.pages, node.parent = node.keys[cut:], node.pages[num_pages:], upper
        upper.children[self._edge(node)] = node
        self._num_nodes += 1
        return upper

    def _new_node(self, keys: np.ndarray, pages: list[int], parent: TreeNode | None, salt: bytes) -> TreeNode:
        self._serial += 1
        return TreeNode(keys, pages, parent, self._serial, salt)

    def _edge(self, node: TreeNode) -> bytes:
        """Keys of a page have one length, so that no salt can pass for another and some keys."""
        return node.salt + node.keys[: self.page_size].tobytes()

    # ---- shrinking -----------------------------------------------------------------------------

    def evict(self, num_pages: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_pages and self._heap:
            last_use, _, node = heapq.heappop(self._heap)
            if node.is_evictable_leaf and node.last_use == last_use:
                freed += self._shrink(node, num_pages - len(freed))
        self._num_pages -= len(freed)
        self._num_evictable -= len(freed)
        return freed

    def _shrink(self, leaf: TreeNode, num_pages: int) -> list[int]:
        """Take up to ``num_pages`` from the leaf's end: the front of a prefix is worth more."""
        keep = max(0, len(leaf.pages) - num_pages)
        taken = leaf.pages[keep:][::-1]
        if keep:
            leaf.keys, leaf.pages = leaf.keys[: keep * self.page_size].copy(), leaf.pages[:keep]
            self._offer(leaf)
            return taken
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._edge(leaf)]
        leaf.parent = None
        self._num_nodes -= 1
        self._offer(parent)
        return taken

    def _offer(self, node: TreeNode) -> None:
        """Put the node up for eviction if it is an unlocked leaf."""
        if not node.is_evictable_leaf:
            return
        heapq.heappush(self._heap, (node.last_use, node.serial, node))
        if len(self._heap) > 2 * self._num_nodes + HEAP_SLACK:
            live = {n.serial: (t, s, n) for t, s, n in self._heap if n.is_evictable_leaf and n.last_use == t}
            self._heap = sorted(live.values())

    def reset(self) -> list[int]:
        assert self._root.locks == 0, "a locked prefix cannot be forgotten"
        pages = self.owned_pages()
        self._start()
        return pages

    # ---- checks --------------------------------------------------------------------------------

    def owned_pages(self) -> list[int]:
        return [page for node in self._nodes() for page in node.pages]

    def _nodes(self) -> list[TreeNode]:
        nodes, todo = [], [self._root]
        while todo:
            node = todo.pop()
            nodes.append(node)
            todo.extend(node.children.values())
        return nodes

    def check_integrity(self) -> None:
        nodes = self._nodes()
        pages = self.owned_pages()
        assert len(pages) == len(set(pages)) == self._num_pages, "a page is in the tree twice"
        assert len(nodes) == self._num_nodes + 1
        unlocked = sum(len(node.pages) for node in nodes if node.locks == 0)
        assert unlocked == self._num_evictable, f"{unlocked} evictable pages, counted {self._num_evictable}"
        offered = {node.serial for last_use, _, node in self._heap if node.last_use == last_use}
        for node in nodes:
            assert node.locks >= sum(child.locks for child in node.children.values())
            if node is self._root:
                continue
            assert len(node.keys) == len(node.pages) * self.page_size > 0
            assert node.parent is not None and node.parent.children[self._edge(node)] is node
            assert not node.is_evictable_leaf or node.serial in offered, "a leaf cannot be evicted"
