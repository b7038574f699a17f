#include "shardstep/process_group.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <csignal>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

#include "launch/chosen_group.h"
#include "launch/launch_environment.h"
#include "launch/process_group_backends.h"
#include "launch/who.h"

namespace shardstep {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using BackendType = c10d::ProcessGroup::BackendType;

struct DefaultGroup {
  std::mutex mutex;
  ProcessGroupPtr group;
};

// A rank that dies closes its sockets, and by default, writing to one ends the process silently.
// The other ranks must get an error instead. Python ignores SIGPIPE too.
void ignore_broken_pipes() {
  struct sigaction action{};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
    action.sa_handler = SIG_IGN;
    ::sigaction(SIGPIPE, &action, nullptr);
  }
}

// Never destroyed: a group's threads must not be joined while the process is being torn down.
DefaultGroup& default_group() {
  static auto* instance = new DefaultGroup;
  return *instance;
}

std::optional<std::string> environment_variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

StorePtr open_store(const detail::LaunchEnvironment& launch, std::chrono::milliseconds timeout) {
  if (launch.world_size == 1) return c10::make_intrusive<c10d::HashStore>();
  if (!launch.store_file.empty()) {
    return c10::make_intrusive<c10d::FileStore>(launch.store_file, launch.world_size);
  }
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.isServer = launch.hosts_store;
  options.waitWorkers = false;  // Its counter has no prefix, so restarts would share it.
  options.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(launch.host, options);
}

std::string meeting_place(const detail::LaunchEnvironment& launch) {
  return launch.store_file.empty() ? launch.host + ":" + std::to_string(launch.port)
                                   : launch.store_file;
}

ProcessGroupPtr make_launched_group(const detail::LaunchEnvironment& launch,
                                    const ProcessGroupOptions& options) {
  try {
    auto store = open_store(launch, options.timeout());
    store->setTimeout(options.timeout());
    auto group = make_process_group(
        c10::make_intrusive<c10d::PrefixStore>("shardstep/" + launch.key_prefix, store),
        launch.rank, launch.world_size, options);
    // The host of the store may exit right afterwards, so no rank may still need it.
    group->barrier()->wait();
    return group;
  } catch (const c10::ValueError&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(launch.world_size == 1, "shardstep: expected ", launch.world_size,
                " ranks to meet at ", meeting_place(launch), ", got: ", error.what(),
                detail::who(launch.rank, launch.world_size));
    throw;
  }
}

void check_ranks(const std::vector<int>& ranks, int rank, int size) {
  TORCH_CHECK_VALUE(!ranks.empty(), "shardstep: expected at least one rank for a new group, got ",
                    "none", detail::who(rank, size));
  std::set<int> seen;
  for (int member : ranks) {
    TORCH_CHECK_VALUE(member >= 0 && member < size, "shardstep: expected ranks from 0 to ",
                      size - 1, " for a new group, got ", member, detail::who(rank, size));
    TORCH_CHECK_VALUE(seen.insert(member).second, "shardstep: expected every rank of a new group ",
                      "once, got ", member, " twice", detail::who(rank, size));
  }
}

std::string join(const std::vector<int>& ranks) {
  std::string text = "[";
  for (int rank : ranks) text += (text.size() == 1 ? "" : ", ") + std::to_string(rank);
  return text + "]";
}

// Throws on every rank if one of them passed another list.
void check_same_ranks(const StorePtr& store, const std::vector<int>& ranks, int rank, int size) {
  auto key = [](int r) { return "ranks/" + std::to_string(r); };
  const auto mine = join(ranks);
  store->set(key(rank), mine);
  const auto first = store->get_to_str(key(0));
  for (int other = 1; other < size; ++other) {
    auto theirs = store->get_to_str(key(other));
    TORCH_CHECK_VALUE(theirs == first, "shardstep: expected the same ranks for a new group on ",
                      "every rank, got ", first, " on rank 0 and ", theirs, " on rank ", other,
                      detail::who(rank, size));
  }
}

// Connects with the other ranks. Gloo's errors do not say whose they are.
c10::intrusive_ptr<c10d::Backend> connect(const StorePtr& store, int rank, int size,
                                          std::chrono::milliseconds timeout) {
  const auto context = "shardstep: while connecting with the other ranks" + detail::who(rank, size);
  try {
    return detail::make_gloo_backend(store, rank, size, timeout);
  } catch (c10::Error& error) {
    error.add_context(context);
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(c10::str(error.what(), "\n", context));
  }
}

}  // namespace

ProcessGroupPtr make_process_group(const StorePtr& store, int rank, int size,
                                   const ProcessGroupOptions& options) {
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size,
                    "shardstep: expected a rank from 0 to size - 1, got rank ", rank, " and size ",
                    size);
  TORCH_CHECK_VALUE(options.timeout().count() > 0, "shardstep: expected a positive timeout, got ",
                    options.timeout().count(), " ms", detail::who(rank, size));
  auto backend = options.backend();
  if (backend.empty()) backend = detail::nccl_is_usable() ? "nccl" : "gloo";
  TORCH_CHECK_VALUE(backend == "gloo" || backend == "nccl",
                    "shardstep: expected backend \"gloo\", \"nccl\" or \"\", got \"", backend, "\"",
                    detail::who(rank, size));
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  if (backend == "nccl") {
    auto nccl_store = c10::make_intrusive<c10d::PrefixStore>("nccl", store);
    auto nccl = detail::make_nccl_backend(nccl_store, rank, size, options.timeout());
    group->setBackend(c10::DeviceType::CUDA, BackendType::NCCL, nccl);
  }
  ignore_broken_pipes();
  auto gloo = connect(store, rank, size, options.timeout());
  group->setBackend(c10::DeviceType::CPU, BackendType::GLOO, gloo);
  group->setDefaultBackend(backend == "nccl" ? BackendType::NCCL : BackendType::GLOO);
  return group;
}

ProcessGroupPtr init_process_group(const ProcessGroupOptions& options) {
  auto& current = default_group();
  std::lock_guard lock(current.mutex);
  TORCH_CHECK(!current.group, "shardstep: expected init_process_group() to be called once, got a ",
              "second call; use default_process_group(), or destroy_process_group() first",
              current.group ? detail::who(current.group) : "");
  current.group =
      make_launched_group(detail::read_launch_environment(environment_variable), options);
  return current.group;
}

ProcessGroupPtr default_process_group() {
  auto& current = default_group();
  std::lock_guard lock(current.mutex);
  TORCH_CHECK(current.group, "shardstep: expected a default process group, got none; call ",
              "shardstep::init_process_group() first, or pass a group");
  return current.group;
}

bool has_default_process_group() {
  auto& current = default_group();
  std::lock_guard lock(current.mutex);
  return static_cast<bool>(current.group);
}

void destroy_process_group() {
  ProcessGroupPtr last;  // Destroyed after the lock is released.
  auto& current = default_group();
  std::lock_guard lock(current.mutex);
  std::swap(last, current.group);
}

ProcessGroupPtr new_group(const std::vector<int>& ranks, const ProcessGroupOptions& options,
                          const std::optional<ProcessGroupPtr>& given_parent) {
  const auto parent = detail::chosen_group(given_parent);
  const int rank = parent->getRank();
  const int size = parent->getSize();
  // Counted in the store, rank by rank, so that all ranks get the same number without any state of
  // our own.
  auto count = parent->getStore()->add("shardstep/new_group/" + std::to_string(rank), 1);
  auto store = c10::make_intrusive<c10d::PrefixStore>(
      "shardstep/new_group/number/" + std::to_string(count), parent->getStore());
  check_same_ranks(store, ranks, rank, size);
  check_ranks(ranks, rank, size);
  ProcessGroupPtr group;
  auto place = std::find(ranks.begin(), ranks.end(), rank);
  if (place != ranks.end()) {
    group = make_process_group(store, static_cast<int>(place - ranks.begin()),
                               static_cast<int>(ranks.size()), options);
    auto& global_ranks = group->getDefaultBackend()->getBackendOptions()->global_ranks_in_group;
    for (int member : ranks) global_ranks.push_back(global_rank(parent, member));
  }
  // As in init_process_group, the host of the store may exit right afterwards.
  parent->barrier()->wait();
  return group;
}

int global_rank(const ProcessGroupPtr& group, int rank) {
  detail::check_member(group);
  TORCH_CHECK_VALUE(rank >= 0 && rank < group->getSize(), "shardstep: expected a rank from 0 to ",
                    group->getSize() - 1, ", got ", rank, detail::who(group));
  const auto& ranks = group->getDefaultBackend()->getBackendOptions()->global_ranks_in_group;
  return ranks.empty() ? rank : static_cast<int>(ranks.at(rank));
}

}  // namespace shardstep
