#include "support/test_support.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <latch>
#include <limits>
#include <mutex>
#include <sstream>
#include <thread>

#include "sim_device.h"
#include "simccl.h"
#include "support/device.h"

// torch's zip reader forgets its index when a damaged file makes its constructor throw.
extern "C" const char* __lsan_default_suppressions() { return "leak:mz_zip_reader_"; }

// As without it, where a test asks for more memory than there is.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

// A template of torch that torch::save and torch::load instantiate here keeps a std::regex in a
// function's static, which libtorch, which is not instrumented, makes and guards.
extern "C" const char* __tsan_default_suppressions() {
  return "race:torch::jit::SourceImporterImpl::attributeAssignmentSpecialHandlingHack";
}

namespace shardstep::test {
namespace {

// Aborts the process, so that a debugger or core shows every stack, unless destroyed in time.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds limit)
      : thread_([this, limit] {
          std::unique_lock lock(mutex_);
          if (done_.wait_for(lock, limit, [this] { return finished_; })) return;
          std::fprintf(stderr, "ranks did not finish within %lld s: aborting\n",
                       static_cast<long long>(limit.count()));
          std::abort();
        }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      finished_ = true;
    }
    done_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool finished_ = false;
  std::thread thread_;
};

ProcessGroupPtr make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                           std::chrono::milliseconds timeout) {
  if (!on_sim_device()) {
    return make_process_group(store, rank, world_size,
                              ProcessGroupOptions().backend("gloo").timeout(timeout));
  }
  sim::set_current_device(rank);
  return sim::make_group(store, rank, world_size, timeout);
}

}  // namespace

void run_ranks(int world_size, const std::function<void(const ProcessGroupPtr&)>& body,
               std::chrono::seconds limit, std::chrono::milliseconds timeout) {
  Watchdog watchdog(patience() * limit);
  auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(timeout);
  std::mutex mutex;
  std::exception_ptr first_error;
  auto report = [&](int rank, const char* what) {
    std::lock_guard lock(mutex);
    std::fprintf(stderr, "rank %d of %d let an exception through: %s\n", rank, world_size, what);
    if (!first_error) first_error = std::current_exception();
  };
  // A rank that is done at once would close connections that others are still making.
  std::latch connected(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      // Dies after the report, so that its error precedes those of the ranks that then see a closed
      // connection.
      ProcessGroupPtr group;
      bool started = false;
      try {
        at::set_num_threads(1);
        group = make_group(store, rank, world_size, timeout);
        started = true;
        connected.arrive_and_wait();
        body(group);
      } catch (const std::exception& error) {
        report(rank, error.what());
      } catch (...) {
        report(rank, "not a std::exception");
      }
      if (!started) connected.count_down();
    });
  }
  for (auto& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

Hosts::Hosts(const std::string& names) {
  if (!names.empty()) ::setenv("SHARDSTEP_TEST_HOSTS", names.c_str(), 1);
}

Hosts::~Hosts() { ::unsetenv("SHARDSTEP_TEST_HOSTS"); }

std::vector<std::vector<int>> ranks_by_host(const std::string& names, int world_size) {
  std::vector<std::string> known;
  std::vector<std::vector<int>> hosts;
  std::istringstream all(names);
  std::string name;
  for (int rank = 0; rank < world_size; ++rank) {
    std::string next;
    if (std::getline(all, next, ',')) name = next;
    const auto found = std::find(known.begin(), known.end(), name);
    const auto host = static_cast<size_t>(found - known.begin());
    if (found == known.end()) {
      known.push_back(name);
      hosts.emplace_back();
    }
    hosts[host].push_back(rank);
  }
  return hosts;
}

at::Tensor as_sent(const at::Tensor& gradient, std::optional<at::ScalarType> wire) {
  if (!wire) return gradient;
  if (*wire != at::kChar) return gradient.to(*wire).to(gradient.scalar_type());
  const auto values = gradient.to(at::kFloat).flatten();
  std::vector<at::Tensor> blocks;
  for (const auto& block : values.split(256)) {
    if (block.numel() == 0) continue;
    const auto largest = block.abs().amax();
    const auto scale = at::clamp_min(largest / 127, std::numeric_limits<float>::min());
    if (!largest.isfinite().item<bool>()) {
      blocks.push_back(at::full_like(block, std::numeric_limits<float>::quiet_NaN()));
    } else {
      blocks.push_back(at::round(block * scale.reciprocal()) * scale);
    }
  }
  if (blocks.empty()) return gradient;
  return at::cat(blocks).view(gradient.sizes()).to(gradient.scalar_type());
}

at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

}  // namespace shardstep::test
