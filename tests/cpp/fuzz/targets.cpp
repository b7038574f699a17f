#include "fuzz/targets.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <caffe2/serialize/inline_container.h>

#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "checkpoint/checkpoint_files.h"
#include "checkpoint/fuzz/read_checkpoint.h"
#include "format/crc32.h"
#include "launch/launch_environment.h"
#include "shardstep/checkpoint.h"
#include "shardstep/state_dict.h"
#include "support/folder.h"

namespace shardstep::test {
namespace {

constexpr const char* kFuzzId = "0123456789abcdef";
const std::string kShardName = std::string("/shard-") + kFuzzId + "-0.safetensors";

std::string bytes_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void put_file(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

// Runs `read`; false if it refuses its input, by a ValueError as docs/failures.md promises.
template <class Refusal = c10::ValueError, class Read>
bool reads(const Read& read) {
  try {
    read();
    return true;
  } catch (const Refusal& error) {
    refusal_text(error);
    return false;
  }
}

detail::ShardContent fuzz_content() {
  detail::ShardContent content;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const CheckpointTensor whole{
        tensor.scalar_type(), tensor.sizes().vec(), memory_order(tensor), {}};
    content.parts.push_back({name, whole, {0, tensor.numel()}, tensor});
  };
  add("state.0.exp_avg", at::arange(12, at::kFloat).view({3, 4}));
  add("state.1.exp_avg", at::arange(6, at::kFloat).view({2, 3}).t());
  add("module.weight", at::arange(12, at::kBFloat16).view({3, 4}));
  add("rng.0.cpu", at::arange(16, at::kByte));
  content.state = {{0, {"exp_avg", "step"}}, {1, {"exp_avg"}}};
  content.values = {{"state.0.step", c10::IValue(3.0)}};
  return content;
}

// What the index says besides the shard.
CheckpointIndex fuzz_index() {
  CheckpointIndex index;
  index.id = kFuzzId;
  index.block = 16;
  StateDict::ParamGroup group;
  group.options.insert("lr", 0.1);
  group.options.insert("betas", c10::ivalue::Tuple::create({0.9, 0.999}));
  group.options.insert("foreach", c10::IValue());
  group.params = {0, 1};
  index.param_groups = {group};
  index.parameters = {{"weight", std::vector<int64_t>{3, 4}, at::kFloat},
                      {std::nullopt, std::vector<int64_t>{3, 2}, at::kFloat}};
  c10::impl::GenericDict extra(c10::StringType::get(), c10::AnyType::get());
  extra.insert("step", int64_t{3});
  extra.insert("loss", at::tensor(0.5f));
  extra.insert("dtype", dtype_to_value(at::kBFloat16));
  index.extra = extra;
  index.module_values = {{"extra_state", c10::IValue("text")}};
  return index;
}

// A directory with one shard and its index.
struct FuzzCheckpoint {
  FuzzCheckpoint() : directory(folder / "checkpoint"), empty(folder / "another") {
    std::filesystem::create_directories(directory);
    std::filesystem::create_directories(empty);
    const auto index = fuzz_index();
    {
      detail::ShardWriter writer(directory, fuzz_content(), index, 0);
      for (size_t i = 0; i < writer.content().parts.size(); ++i) {
        const auto tensor = writer.content().parts[i].tensor;
        writer.write(i, tensor);
      }
      writer.commit();
    }
    detail::commit_index(directory, index);
    shard = bytes_of_file(directory + kShardName);
    std::memcpy(&header_size, shard.data(), sizeof(header_size));
  }
  std::string_view header() const {
    return std::string_view(shard).substr(sizeof(uint64_t), header_size);
  }
  std::string_view data() const {
    return std::string_view(shard).substr(sizeof(uint64_t) + header_size);
  }

  Folder folder;
  std::string directory, empty;
  std::string shard;
  uint64_t header_size = 0;
};

FuzzCheckpoint& fuzz_checkpoint() {
  static FuzzCheckpoint checkpoint;
  return checkpoint;
}

// index.json: what follows its checksum, which is made to match, because a fuzzer cannot guess it.
constexpr size_t kChecksumBytes = 21;  // {"crc-32":"........",

bool read_index(std::string_view input) {
  char checksum[kChecksumBytes + 1];
  std::snprintf(checksum, sizeof(checksum), "{\"crc-32\":\"%08x\",",
                detail::crc32(input.data(), input.size()));
  auto& checkpoint = fuzz_checkpoint();
  put_file(checkpoint.directory + "/index.json", checksum + std::string(input));
  return read_whole_checkpoint(checkpoint.directory).state.has_value();
}

std::vector<std::string> index_seeds() {
  const auto& checkpoint = fuzz_checkpoint();
  auto index = fuzz_index();
  detail::commit_index(checkpoint.directory, index);
  return {bytes_of_file(checkpoint.directory + "/index.json").substr(kChecksumBytes)};
}

// A shard: its header, or the whole file if the first byte is not printable.
bool read_shard(std::string_view input) {
  auto& checkpoint = fuzz_checkpoint();
  const auto& directory = checkpoint.empty;
  std::string bytes(input);
  if (input.empty() || input[0] >= ' ') {
    const uint64_t length = input.size();
    bytes.insert(0, reinterpret_cast<const char*>(&length), sizeof(length));
    bytes += checkpoint.data();
  }
  put_file(directory + kShardName, bytes);
  // A save, for which a shard that changed is no wrong value.
  const bool committed = reads<c10::Error>([&] { detail::commit_index(directory, fuzz_index()); });
  if (!committed) return false;
  // What a save makes a checkpoint must open; its tensors need not have their checksums.
  Checkpoint opened(directory);
  opened.verify_headers();
  return read_whole_checkpoint(directory).state.has_value();
}

std::vector<std::string> shard_seeds() {
  return {std::string(fuzz_checkpoint().header()), fuzz_checkpoint().shard};
}

// Torch's memory, filled with a byte where one is set.
class FilledMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    auto memory = c10::GetDefaultCPUAllocator()->allocate(size);
    if (fill && size > 0) std::memset(memory.get(), *fill, size);
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return c10::GetDefaultCPUAllocator()->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

  std::optional<unsigned char> fill;
};

// Reads the file into memory of zeros, then of ones: a byte that was not read would differ.
StateDict read_completely(const std::string& path) {
  static FilledMemory memory;
  static const bool is_used = (c10::SetCPUAllocator(&memory, /*priority=*/1), true);
  require(is_used && c10::GetCPUAllocator() == &memory, "another allocator is used");
  memory.fill = 0;
  auto dict = read_state_dict(path);
  memory.fill = 0xff;
  const bool same = same_state(read_state_dict(path), dict);
  memory.fill.reset();
  require(same, "a state dict has memory that was not read");
  return dict;
}

// A state dict's file that was accepted is read in the other ways too: tensor by tensor, into a
// checkpoint, and once more after it was written again.
void read_again(const std::string& path, const StateDict& dict) {
  const auto& folder = fuzz_checkpoint().folder;
  const auto again = folder / "again.pt", directory = folder / "imported";
  write_state_dict(dict, again);
  require(same_state(read_state_dict(again), dict), "a state dict changed when written and read");
  // A checkpoint refuses some values, such as tensors that overlap themselves.
  if (!reads([&] { import_state_dict(path, directory); })) return;
  const auto imported = read_checkpoint(directory);
  require(imported.state.size() == dict.state.size() &&
              imported.param_groups.size() == dict.param_groups.size(),
          "a state dict changed when it became a checkpoint");
}

bool read_state_dict_file(std::string_view input) {
  const auto path = fuzz_checkpoint().folder / "file.pt";
  put_file(path, input);
  std::optional<StateDict> dict;
  if (!reads([&] { dict = read_completely(path); })) return false;
  read_again(path, *dict);
  return true;
}

// A zip file as torch.save writes it, with this pickle and three storages.
void write_zip(const std::string& path, std::string_view pickle) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  caffe2::serialize::PyTorchStreamWriter zip([&](const void* data, size_t size) {
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
    return size;
  });
  const auto put = [&](const std::string& name, std::string_view bytes) {
    zip.writeRecord(name, bytes.data(), bytes.size());
  };
  put("data.pkl", pickle);
  put("byteorder", "little");
  put("data/0", std::string(4, '\1'));
  put("data/1", std::string(48, '\2'));
  put("data/2", std::string(8192, '\3'));
  zip.writeEndOfFile();
}

bool read_pickle_in_zip(std::string_view input) {
  const auto path = fuzz_checkpoint().folder / "pickle.pt";
  write_zip(path, input);
  std::optional<StateDict> dict;
  if (!reads([&] { dict = read_completely(path); })) return false;
  read_again(path, *dict);
  return true;
}

StateDict seed_dict() {
  StateDict dict;
  NamedValues adam;
  adam.insert("step", at::tensor(3.0f));
  adam.insert("exp_avg", at::ones({3, 4}));
  adam.insert("large", at::ones({4, 512}).t());
  dict.state.emplace(0, adam);
  dict.param_groups = fuzz_index().param_groups;
  dict.param_groups[0].options.insert("master_dtype", dtype_to_value(at::kFloat));
  return dict;
}

std::vector<std::string> file_seeds() {
  const auto path = fuzz_checkpoint().folder / "seed.pt";
  auto dict = seed_dict();
  dict.state.at(0).erase("large");
  write_state_dict(dict, path);
  return {bytes_of_file(path)};
}

std::vector<std::string> pickle_seeds() {
  const auto path = fuzz_checkpoint().folder / "seed.pt";
  write_state_dict(seed_dict(), path);
  caffe2::serialize::PyTorchStreamReader zip(path);
  const auto [data, size] = zip.getRecord("data.pkl");
  return {std::string(static_cast<const char*>(data.get()), size)};
}

// Lines NAME=value.
bool read_environment(std::string_view input) {
  std::map<std::string, std::string> environment;
  std::istringstream lines{std::string(input)};
  for (std::string line; std::getline(lines, line);) {
    const auto equals = line.find('=');
    if (equals == std::string::npos) continue;
    environment[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return reads([&] {
    const auto launch =
        detail::read_launch_environment([&](const char* name) -> std::optional<std::string> {
          const auto found = environment.find(name);
          if (found == environment.end() || found->second.empty()) return std::nullopt;
          return found->second;
        });
    require(0 <= launch.rank && launch.rank < launch.world_size, "a rank that cannot be");
    const bool meets = launch.world_size == 1 || !launch.store_file.empty() ||
                       (!launch.host.empty() && launch.port != 0);
    require(meets, "several ranks that have nowhere to meet");
  });
}

std::vector<std::string> environment_seeds() {
  return {
      "RANK=1\nWORLD_SIZE=4\nMASTER_ADDR=node7\nMASTER_PORT=29400\nTORCHELASTIC_RUN_ID=job\n"
      "TORCHELASTIC_RESTART_COUNT=0\nTORCHELASTIC_USE_AGENT_STORE=True\n",
      "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_SIZE=2\n"
      "PMIX_NAMESPACE=2107506689\nPMIX_SERVER_TMPDIR=/tmp/ompi.host.0/pid.7\n",
      "SLURM_PROCID=3\nSLURM_STEP_NUM_TASKS=8\nSLURM_STEP_ID=0\nSLURM_JOB_ID=77\n"
      "SLURM_STEP_NUM_NODES=3\nSLURM_STEP_NODELIST=gpu[07-09,12]x,login1\n"
      "SLURM_RESTART_COUNT=1\n",
      "SLURM_PROCID=0\nSLURM_NTASKS=2\nSLURM_STEPID=1\nSLURM_JOB_ID=7\nMASTER_PORT=7\n"
      "SLURM_LAUNCH_NODE_IPADDR=10.0.0.1\n"};
}

}  // namespace

const std::vector<FuzzTarget>& fuzz_targets() {
  static const std::vector<FuzzTarget> targets{
      {"index", read_index, index_seeds},
      {"shard", read_shard, shard_seeds},
      {"pickle", read_pickle_in_zip, pickle_seeds},
      {"state_dict", read_state_dict_file, file_seeds},
      {"environment", read_environment, environment_seeds},
  };
  return targets;
}

const FuzzTarget& fuzz_target(const std::string& name) {
  for (const auto& target : fuzz_targets()) {
    if (name == target.name) return target;
  }
  throw std::invalid_argument("expected the name of a fuzz target, got " + name);
}

}  // namespace shardstep::test
