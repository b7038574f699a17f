#pragma once

// Comparing what ranks were given before they exchange anything else, and passing on errors.

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "comm/exchange.h"
#include "shardstep/export.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

// The device of a group's small control messages.
at::Device control_device(const ProcessGroupPtr& group);

// The tensor of every rank, by rank and on the CPU. REQUIRES: one shape on all ranks. Collective.
std::vector<at::Tensor> all_gather(const ProcessGroupPtr& group, const at::Tensor& own);

// The same through an exchange, whose messages with other tags may be under way.
std::vector<at::Tensor> all_gather(Exchange& exchange, const at::Tensor& own, MessageTag tag);

// The number of every rank, by rank. Collective.
SHARDSTEP_API std::vector<double> all_gather_number(const ProcessGroupPtr& group, double own);

// Every rank passes `lines` that should be the same on all ranks, or the error that kept it from
// making them. If they are the same, returns a number that all ranks agree on and that none of them
// got before. If not, every rank throws: its own error, or one that names the first rank and line
// that differ. Collective.
int64_t agree(const ProcessGroupPtr& group, const std::vector<std::string>& lines,
              const std::exception_ptr& error);

// What went wrong on a rank.
struct Failure {
  int rank = 0;
  std::string message;
  bool is_value_error = false;
};

// The message of an exception.
std::string message_of(const std::exception_ptr& error);

// Returns, on every rank, the failure of the first rank that passes an error; unset if none does.
// Throws only if the ranks cannot communicate. Collective.
std::optional<Failure> first_failure(const ProcessGroupPtr& group, const std::exception_ptr& error);

// Throws what first_failure found: this rank's own error, or one that names the rank that failed.
[[noreturn]] void throw_failure(const ProcessGroupPtr& group, const Failure& failure,
                                const std::exception_ptr& error);

// Throws on every rank if any of them passes an error. Collective.
SHARDSTEP_API void tell_every_rank(const ProcessGroupPtr& group, const std::exception_ptr& error);

}  // namespace shardstep::detail
