#include "comm/agreement.h"

#include <atomic>

#include "comm/connection_watch.h"
#include "comm/lost_ranks.h"
#include "comm/peer_input.h"
#include "failure_points.h"
#include "launch/who.h"

namespace shardstep::detail {
namespace {

std::atomic<int64_t> next_number{0};
constexpr int64_t kMostNumber = int64_t{1} << 48;

// FNV-1a: the same on every machine, unlike std::hash.
int64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3u;
  return static_cast<int64_t>(hash);
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + '\n';
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size(); begin += lines.back().size() + 1) {
    lines.push_back(text.substr(begin, text.find('\n', begin) - begin));
  }
  return lines;
}

// Bytes of texts that travel; longer ones are cut. Each rank receives as much from every rank.
constexpr int64_t kMostError = 64 << 10, kMostLines = 16 << 20;

std::string cut_to(int64_t most, std::string text) {
  if (static_cast<int64_t>(text.size()) <= most) return text;
  const auto mark = c10::str("... (cut: ", text.size(), " bytes)");
  auto size = static_cast<size_t>(most) - mark.size();
  // Not within a character of UTF-8.
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80) --size;
  return text.substr(0, size) + mark;
}

int64_t check_size(const ProcessGroupPtr& group, int rank, int64_t size, int64_t most) {
  return PeerInput(group, rank).check("the size of a text", size, 0, most);
}

// REQUIRES: sizes that were checked, and the same on all ranks.
std::vector<std::string> all_gather_text(const ProcessGroupPtr& group, const std::string& own,
                                         const std::vector<int64_t>& sizes) {
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  auto padded = at::zeros({longest}, at::kByte);
  std::copy(own.begin(), own.end(), padded.data_ptr<uint8_t>());
  std::vector<std::string> texts;
  for (const auto& tensor : all_gather(group, padded)) {
    texts.emplace_back(reinterpret_cast<const char*>(tensor.const_data_ptr<uint8_t>()),
                       sizes[texts.size()]);
  }
  return texts;
}

// Which rank first differs from rank 0, and where.
std::string first_difference(const std::vector<std::string>& texts) {
  const auto expected = split(texts[0]);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const auto got = split(texts[rank]);
    for (size_t i = 0; i < std::max(expected.size(), got.size()); ++i) {
      const std::string none = "nothing more";
      const auto& theirs = i < got.size() ? got[i] : none;
      const auto& ours = i < expected.size() ? expected[i] : none;
      if (ours != theirs) {
        return c10::str("expected the same on every rank, got \"", ours, "\" on rank 0 and \"",
                        theirs, "\" on rank ", rank);
      }
    }
  }
  return "expected the same on every rank";
}

}  // namespace

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

at::Device control_device(const ProcessGroupPtr& group) {
  const auto devices = group->getDeviceTypes();
  TORCH_CHECK_VALUE(!devices.empty(),
                    "shardstep: expected a process group with a backend, got one without");
  for (const auto& device : devices) {
    if (device.is_cpu()) return device;
  }
  return devices.front();
}

std::vector<at::Tensor> all_gather(const ProcessGroupPtr& group, const at::Tensor& own) {
  std::vector<at::Tensor> input{own.to(control_device(group))};
  std::vector<std::vector<at::Tensor>> output(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    output[0].push_back(at::empty_like(input[0]));
  }
  try {
    wait_for_collective(*group->allgather(output, input), group);
  } catch (const std::exception&) {
    // Backends do not say which rank they are, or lost.
    const auto error = message_of(std::current_exception());
    TORCH_CHECK(false, "shardstep: lost another rank while agreeing with all of them: ", error,
                lost_ranks(group), who(group));
  }
  return at::stack(output[0]).cpu().unbind();  // the host waits for a device once
}

std::vector<at::Tensor> all_gather(Exchange& exchange, const at::Tensor& own, MessageTag tag) {
  const auto& group = exchange.process_group();
  auto all =
      at::empty({group->getSize(), own.numel()}, own.options().device(control_device(group)));
  all[group->getRank()].copy_(own);
  Parts parts;
  for (const auto& one : all.unbind()) parts.push_back({one});
  exchange.all_gather(parts, tag)->wait();
  return all.cpu().unbind();
}

std::vector<double> all_gather_number(const ProcessGroupPtr& group, double own) {
  if (group->getSize() == 1) return {own};
  std::vector<double> numbers;
  for (const auto& number : all_gather(group, at::full({1}, own, at::kDouble))) {
    numbers.push_back(number.item<double>());
  }
  return numbers;
}

int64_t agree(const ProcessGroupPtr& group, const std::vector<std::string>& lines,
              const std::exception_ptr& error) {
  if (group->getSize() == 1) {
    if (error) std::rethrow_exception(error);
    return next_number++;
  }
  const std::string whole = error ? message_of(error) : join(lines);
  const std::string text = cut_to(error ? kMostError : kMostLines, whole);
  const auto summary =
      at::tensor({error ? 0 : hash_of(whole), static_cast<int64_t>(error != nullptr),
                  static_cast<int64_t>(text.size()), next_number.load()},
                 at::kLong);
  SHARDSTEP_FAILURE_POINT("agreement: asks");
  const auto summaries = all_gather(group, summary);
  SHARDSTEP_FAILURE_POINT("agreement: heard");
  bool same = true;
  std::optional<int> failed;
  std::vector<int64_t> sizes, error_sizes;
  int64_t number = 0;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const auto* fields = summaries[rank].const_data_ptr<int64_t>();
    same = same && fields[0] == summaries[0].const_data_ptr<int64_t>()[0];
    const bool has_failed = fields[1] != 0;
    if (has_failed && !failed) failed = rank;
    sizes.push_back(check_size(group, rank, fields[2], has_failed ? kMostError : kMostLines));
    error_sizes.push_back(has_failed ? sizes.back() : 0);
    const PeerInput peer(group, rank);
    number = std::max(number, peer.check("the number of an agreement", fields[3], 0, kMostNumber));
  }
  // Beyond every rank's, so that no rank ever gets a number twice.
  for (int64_t seen = next_number; seen <= number;) {
    if (next_number.compare_exchange_weak(seen, number + 1)) break;
  }
  if (same && !failed) return number;

  const auto texts = failed ? all_gather_text(group, error ? text : "", error_sizes)
                            : all_gather_text(group, text, sizes);
  if (error) std::rethrow_exception(error);
  TORCH_CHECK_VALUE(!failed, "shardstep: rank ", *failed, " failed with: ", texts[*failed],
                    who(group));
  TORCH_CHECK_VALUE(false, "shardstep: ", first_difference(texts), who(group));
}

std::optional<Failure> first_failure(const ProcessGroupPtr& group,
                                     const std::exception_ptr& error) {
  bool is_value_error = false;
  try {
    if (error) std::rethrow_exception(error);
  } catch (const c10::ValueError&) {
    is_value_error = true;
  } catch (...) {
  }
  const auto text = error ? cut_to(kMostError, message_of(error)) : "";
  if (group->getSize() == 1) {
    if (!error) return std::nullopt;
    return Failure{0, text, is_value_error};
  }
  const auto summaries = all_gather(
      group, at::tensor({static_cast<int64_t>(error != nullptr),
                         static_cast<int64_t>(is_value_error), static_cast<int64_t>(text.size())},
                        at::kLong));
  SHARDSTEP_FAILURE_POINT("outcome: heard");
  std::optional<Failure> failure;
  std::vector<int64_t> sizes;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const auto* fields = summaries[rank].const_data_ptr<int64_t>();
    if (fields[0] != 0 && !failure) failure = Failure{rank, "", fields[1] != 0};
    sizes.push_back(check_size(group, rank, fields[2], kMostError));
  }
  if (failure) failure->message = all_gather_text(group, text, sizes)[failure->rank];
  return failure;
}

void throw_failure(const ProcessGroupPtr& group, const Failure& failure,
                   const std::exception_ptr& error) {
  if (error) std::rethrow_exception(error);
  const auto message =
      c10::str("shardstep: rank ", failure.rank, " failed with: ", failure.message, who(group));
  TORCH_CHECK_VALUE(!failure.is_value_error, message);
  TORCH_CHECK(false, message);
}

void tell_every_rank(const ProcessGroupPtr& group, const std::exception_ptr& error) {
  if (const auto failure = first_failure(group, error)) throw_failure(group, *failure, error);
}

}  // namespace shardstep::detail
