#pragma once

// What a launcher says about this process, read from the environment. Pure: the lookup is an
// argument, nothing is opened or connected. Thread safety: as the lookup's.

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
  // Where the ranks meet, if there are several: a file when `store_file` is not empty, else a
  // TCPStore at host:port, which this process hosts or joins.
  std::string store_file;
  std::string host;
  uint16_t port = 0;
  bool hosts_store = false;
  // Keys of different jobs, and of restarts of one job, do not meet under their prefixes.
  std::string key_prefix;
};

LaunchEnvironment read_launch_environment(const EnvironmentLookup& lookup);

// The first host of a Slurm list such as "gpu[07-09,12],login1": "gpu07".
std::string first_slurm_host(const std::string& node_list);

}  // namespace shardstep::detail
