#pragma once

// What the launcher says about this process in the environment. Pure: the lookup is an argument,
// and nothing is opened or connected. Thread safety: that of the lookup.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace shardstep::detail {

// The value of an environment variable; an empty value counts as unset.
using EnvironmentLookup = std::function<std::optional<std::string>(const char* name)>;

enum class Launcher { kNone, kTorchrun, kOpenMpi, kSlurm };

struct LaunchEnvironment {
  Launcher launcher = Launcher::kNone;
  int rank = 0;
  int world_size = 1;
  // Where the ranks meet, if there are several: a file if `store_file` is not empty, else a
  // TCPStore at host:port, which this process hosts or joins.
  std::string store_file;
  std::string host;
  uint16_t port = 0;
  bool hosts_store = false;
  // Separates the keys of different jobs, and of restarts of one job.
  std::string key_prefix;
};

LaunchEnvironment read_launch_environment(const EnvironmentLookup& lookup);

// The first host of a Slurm list such as "gpu[07-09,12],login1": "gpu07".
std::string first_slurm_host(const std::string& node_list);

}  // namespace shardstep::detail
