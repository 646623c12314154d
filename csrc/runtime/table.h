// The table from keys to kernel ids: read without a lock on every call, written rarely.
#pragma once

#include <cstdint>

#include "api.h"

namespace autofa::runtime {

// Nodes are inserted, never moved or freed, so a reader needs no lock and no reclamation; there is
// one per distinct key of the process. Removing an entry leaves its node with id -1.
int64_t table_get(const autofa_key& key);
void table_set(const autofa_key& key, int64_t id);
// Stores `id` unless another thread was first; returns what the table then holds.
int64_t table_add(const autofa_key& key, int64_t id);
void table_clear();

}  // namespace autofa::runtime
