#include "launch/launch_environment.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <string_view>

namespace shardstep::detail {
namespace {

constexpr const char* kStartAdvice =
    "; start the program with torchrun, mpirun or srun, or unset the launcher's variables to run "
    "one process";

std::string required(const EnvironmentLookup& lookup, const char* name, const char* because) {
  auto value = lookup(name);
  TORCH_CHECK_VALUE(value, "shardstep: expected ", name, " to be set because ", because,
                    " is, got nothing", kStartAdvice);
  return *value;
}

int64_t parse_integer(const char* name, const std::string& value, int64_t low, int64_t high) {
  int64_t number = 0;
  const char* end = value.data() + value.size();
  auto [stop, error] = std::from_chars(value.data(), end, number);
  TORCH_CHECK_VALUE(error == std::errc() && stop == end && number >= low && number <= high,
                    "shardstep: expected ", name, " to be an integer from ", low, " to ", high,
                    ", got \"", value, "\"", kStartAdvice);
  return number;
}

constexpr int64_t kMaxRanks = 1 << 24;

void read_rank_and_size(const EnvironmentLookup& lookup, const char* rank_name,
                        const char* size_name, LaunchEnvironment& launch) {
  auto size = required(lookup, size_name, rank_name);
  auto rank = required(lookup, rank_name, size_name);
  launch.world_size = static_cast<int>(parse_integer(size_name, size, 1, kMaxRanks));
  launch.rank = static_cast<int>(parse_integer(rank_name, rank, 0, kMaxRanks));
  TORCH_CHECK_VALUE(launch.rank < launch.world_size, "shardstep: expected ", rank_name,
                    " to be less than ", size_name, ", got ", rank_name, "=", rank, " and ",
                    size_name, "=", size, kStartAdvice);
}

uint16_t parse_port(const std::string& value) {
  return static_cast<uint16_t>(parse_integer("MASTER_PORT", value, 1, 65535));
}

// Below the ephemeral ports, and not torch's default. Two jobs may still get the same one: then the
// second's rank 0 cannot bind and reports it, and the key prefix keeps its other ranks from reading
// the first job's keys.
uint16_t derived_port(std::string_view job) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (unsigned char byte : job) hash = (hash ^ byte) * 16777619u;
  return static_cast<uint16_t>(12000 + hash % 17000);
}

void read_address(const EnvironmentLookup& lookup, const std::string& default_host,
                  LaunchEnvironment& launch) {
  auto port = lookup("MASTER_PORT");
  launch.host = lookup("MASTER_ADDR").value_or(default_host);
  launch.port = port ? parse_port(*port) : derived_port(launch.key_prefix);
  launch.hosts_store = launch.rank == 0;
}

LaunchEnvironment read_torchrun(const EnvironmentLookup& lookup) {
  LaunchEnvironment launch;
  launch.launcher = Launcher::kTorchrun;
  read_rank_and_size(lookup, "RANK", "WORLD_SIZE", launch);
  launch.key_prefix = "torchrun/" + lookup("TORCHELASTIC_RUN_ID").value_or("none") + "/" +
                      lookup("TORCHELASTIC_RESTART_COUNT").value_or("0");
  if (launch.world_size == 1) return launch;
  launch.host = required(lookup, "MASTER_ADDR", "WORLD_SIZE");
  launch.port = parse_port(required(lookup, "MASTER_PORT", "MASTER_ADDR"));
  launch.hosts_store =
      launch.rank == 0 && lookup("TORCHELASTIC_USE_AGENT_STORE").value_or("") != "True";
  return launch;
}

LaunchEnvironment read_open_mpi(const EnvironmentLookup& lookup) {
  LaunchEnvironment launch;
  launch.launcher = Launcher::kOpenMpi;
  read_rank_and_size(lookup, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", launch);
  auto job = lookup("PMIX_NAMESPACE");
  launch.key_prefix = "mpirun/" + job.value_or("none");
  if (launch.world_size == 1) return launch;
  if (!lookup("MASTER_ADDR")) {
    auto local_size = lookup("OMPI_COMM_WORLD_LOCAL_SIZE");
    TORCH_CHECK_VALUE(local_size && parse_integer("OMPI_COMM_WORLD_LOCAL_SIZE", *local_size, 1,
                                                  kMaxRanks) == launch.world_size,
                      "shardstep: expected MASTER_ADDR to be set because this host runs ",
                      local_size.value_or("an unknown number"), " of ", launch.world_size,
                      " ranks, got nothing; add -x MASTER_ADDR=<host of rank 0> to mpirun");
    auto job_folder = lookup("PMIX_SERVER_TMPDIR");
    if (job_folder && job && !lookup("MASTER_PORT")) {
      // mpirun's own folder for this job: no other job shares it, and mpirun removes it.
      launch.store_file = *job_folder + "/shardstep-" + *job;
      return launch;
    }
  }
  if (!lookup("MASTER_PORT")) required(lookup, "PMIX_NAMESPACE", "OMPI_COMM_WORLD_SIZE");
  read_address(lookup, "127.0.0.1", launch);
  return launch;
}

// From here on, Slurm numbers the steps that srun did not start (batch script, interactive shell).
constexpr int64_t kFirstReservedStep = 0xfffffff0;

std::optional<int64_t> srun_step(const EnvironmentLookup& lookup) {
  for (const char* name : {"SLURM_STEP_ID", "SLURM_STEPID"}) {
    auto value = lookup(name);
    if (!value) continue;
    int64_t step = parse_integer(name, *value, 0, 0xffffffff);
    if (step < kFirstReservedStep) return step;
  }
  return std::nullopt;
}

std::string slurm_host(const EnvironmentLookup& lookup) {
  if (lookup("SLURM_STEP_NUM_NODES").value_or("") == "1") return "127.0.0.1";
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"}) {
    if (auto value = lookup(name)) return first_slurm_host(*value);
  }
  return "";
}

LaunchEnvironment read_slurm(const EnvironmentLookup& lookup, int64_t step) {
  LaunchEnvironment launch;
  launch.launcher = Launcher::kSlurm;
  const char* size_name = lookup("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  read_rank_and_size(lookup, "SLURM_PROCID", size_name, launch);
  if (launch.world_size == 1) return launch;
  launch.key_prefix =
      "srun/" + required(lookup, "SLURM_JOB_ID", "SLURM_STEP_ID") + "." + std::to_string(step);
  if (auto restart = lookup("SLURM_RESTART_COUNT")) launch.key_prefix += "/" + *restart;
  read_address(lookup, slurm_host(lookup), launch);
  TORCH_CHECK_VALUE(!launch.host.empty(),
                    "shardstep: expected SLURM_STEP_NODELIST, SLURM_LAUNCH_NODE_IPADDR or "
                    "MASTER_ADDR to name the host of rank 0, got none of them",
                    kStartAdvice);
  return launch;
}

}  // namespace

std::string first_slurm_host(const std::string& node_list) {
  auto open = node_list.find_first_of("[,");
  if (open == std::string::npos || node_list[open] == ',') return node_list.substr(0, open);
  auto end = node_list.find_first_of("-,]", open + 1);
  TORCH_CHECK_VALUE(end != std::string::npos,
                    "shardstep: expected SLURM_STEP_NODELIST to be a list of hosts, got \"",
                    node_list, "\"; set MASTER_ADDR to the host of rank 0");
  auto close = node_list.find(']', open);
  auto suffix_end = node_list.find_first_of("[,", close);
  auto suffix =
      close == std::string::npos
          ? std::string()
          : node_list.substr(close + 1, suffix_end == std::string::npos ? std::string::npos
                                                                        : suffix_end - close - 1);
  return node_list.substr(0, open) + node_list.substr(open + 1, end - open - 1) + suffix;
}

LaunchEnvironment read_launch_environment(const EnvironmentLookup& lookup) {
  if (lookup("RANK") || lookup("WORLD_SIZE")) return read_torchrun(lookup);
  if (lookup("OMPI_COMM_WORLD_RANK") || lookup("OMPI_COMM_WORLD_SIZE")) {
    return read_open_mpi(lookup);
  }
  if (auto step = srun_step(lookup)) return read_slurm(lookup, *step);
  // A job meant to run as many processes must not silently train as one.
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    auto value = lookup(name);
    TORCH_CHECK_VALUE(!value, "shardstep: expected RANK and WORLD_SIZE to be set because ", name,
                      "=", *value, " is, got neither", kStartAdvice);
  }
  return {};
}

}  // namespace shardstep::detail
