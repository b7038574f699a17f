#pragma once

// Ranks compare what they were given before they exchange anything else.

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "shardstep/process_group.h"

namespace shardstep::detail {

// The device that small control messages of a group travel on.
at::Device control_device(const ProcessGroupPtr& group);

// The tensor of every rank, by rank and on the CPU; the same shape everywhere. Collective.
std::vector<at::Tensor> all_gather(const ProcessGroupPtr& group, const at::Tensor& own);

// The number of every rank, by rank. Collective.
std::vector<double> all_gather_number(const ProcessGroupPtr& group, double own);

// Every rank hands in `lines` that should be the same everywhere, or an error that kept it from
// making them. If they are, returns a number that all ranks agree on and that none of them got
// before. If not, every rank throws: its own error, or one that names the first rank and line that
// differ. Collective.
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

// The failure of the first rank that hands in an error, on every rank; nothing if none does. Throws
// only if the ranks cannot talk. Collective.
std::optional<Failure> first_failure(const ProcessGroupPtr& group, const std::exception_ptr& error);

// Throws on a rank what first_failure found: its own error, or one that names the rank.
[[noreturn]] void throw_failure(const ProcessGroupPtr& group, const Failure& failure,
                                const std::exception_ptr& error);

// Throws on every rank if any of them hands in an error. Collective.
void tell_every_rank(const ProcessGroupPtr& group, const std::exception_ptr& error);

}  // namespace shardstep::detail
