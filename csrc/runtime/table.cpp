// A hash table of 4096 chains with atomic heads.
#include "table.h"

#include <atomic>

#include "key.h"

namespace autofa::runtime {
namespace {

constexpr uint32_t kChains = 4096;

struct Node {
  autofa_key key;
  std::atomic<int64_t> id;
  Node* next;
};

std::atomic<Node*> chains[kChains];

Node* find(Node* node, const autofa_key& key) {
  while (node != nullptr && !same(node->key, key)) node = node->next;
  return node;
}

// The node of `key`, made with `id` if there was none; `made` says which.
Node* node_of(const autofa_key& key, int64_t id, bool& made) {
  std::atomic<Node*>& chain = chains[hash(key) % kChains];
  Node* head = chain.load(std::memory_order_acquire);
  made = false;
  if (Node* found = find(head, key)) return found;
  Node* fresh = new Node{key, {id}, head};
  while (!chain.compare_exchange_weak(fresh->next, fresh, std::memory_order_acq_rel)) {
    if (Node* found = find(fresh->next, key)) {
      delete fresh;
      return found;
    }
  }
  made = true;
  return fresh;
}

}  // namespace

int64_t table_get(const autofa_key& key) {
  const Node* node = find(chains[hash(key) % kChains].load(std::memory_order_acquire), key);
  return node == nullptr ? -1 : node->id.load(std::memory_order_acquire);
}

void table_set(const autofa_key& key, int64_t id) {
  bool made;
  Node* node = node_of(key, id, made);
  if (!made) node->id.store(id, std::memory_order_release);
}

int64_t table_add(const autofa_key& key, int64_t id) {
  bool made;
  Node* node = node_of(key, id, made);
  if (made) return id;
  int64_t absent = -1;
  return node->id.compare_exchange_strong(absent, id, std::memory_order_acq_rel) ? id : absent;
}

void table_clear() {
  for (std::atomic<Node*>& chain : chains) {
    for (Node* node = chain.load(std::memory_order_acquire); node != nullptr; node = node->next) {
      node->id.store(-1, std::memory_order_release);
    }
  }
}

}  // namespace autofa::runtime
