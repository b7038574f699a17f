#pragma once

// One function per backend, each in a source file of its own.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>

namespace shardstep::detail {

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout);

// Whether the backend starts a message without waiting, and throws if the connection is closed.
bool refuses_to_send_to_lost_ranks(c10d::Backend& backend);

// Whether the backend sums whole tensors on every rank for a reduce_scatter, by a work that does
// not report completion.
bool reduce_scatter_is_all_reduce(c10d::Backend& backend);

// Whether isCompleted() of a work says if it is, and wait() may be called again after a timeout: so
// it is for Gloo's collectives, but not for its messages.
bool reports_completion(c10d::Work& work);

// Whether this build has NCCL and the machine has a GPU for it.
bool nccl_is_usable();

// Throws unless nccl_is_usable().
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout);

}  // namespace shardstep::detail
