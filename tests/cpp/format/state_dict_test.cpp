#include "shardstep/state_dict.h"

#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include "shardstep/shardstep.h"
#include "support/folder.h"
#include "support/test_support.h"
#include "support/torch.h"

namespace shardstep {
namespace {

namespace fs = std::filesystem;

using test::Folder;

std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), bytes.size());
}

void expect_same_values(const NamedValues& a, const NamedValues& b) {
  ASSERT_EQ(a.keys(), b.keys());
  for (const auto& item : a) {
    const auto& other = b[item.key()];
    ASSERT_EQ(item.value().tagKind(), other.tagKind()) << item.key();
    if (item.value().isTensor()) {
      auto left = item.value().toTensor();
      auto right = other.toTensor();
      EXPECT_EQ(left.scalar_type(), right.scalar_type()) << item.key();
      EXPECT_EQ(left.strides(), right.strides()) << item.key();
      EXPECT_TRUE(at::equal(left, right)) << item.key();
    } else {
      EXPECT_EQ(item.value(), other) << item.key();
    }
  }
}

void expect_same(const StateDict& a, const StateDict& b) {
  ASSERT_EQ(a.state.size(), b.state.size());
  for (const auto& [index, values] : a.state) expect_same_values(values, b.state.at(index));
  ASSERT_EQ(a.param_groups.size(), b.param_groups.size());
  for (size_t i = 0; i < a.param_groups.size(); ++i) {
    EXPECT_EQ(a.param_groups[i].params, b.param_groups[i].params);
    expect_same_values(a.param_groups[i].options, b.param_groups[i].options);
  }
}

// Calls `body`, which must throw ValueError, and returns its message.
template <class Body>
std::string value_error(const Body& body) {
  try {
    body();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a ValueError: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no error";
  return {};
}

StateDict sample() {
  StateDict dict;
  auto shared = at::arange(12, at::kFloat).reshape({3, 4});
  dict.state[0].insert("step", at::scalar_tensor(3.0, at::kFloat));
  dict.state[0].insert("rows", shared);
  dict.state[0].insert("columns", shared.t());
  dict.state[2].insert("part", shared.select(1, 1));
  dict.state[2].insert("empty", at::empty({0, 3}));
  StateDict::ParamGroup group;
  group.options.insert("lr", 0.1);
  group.options.insert("betas", c10::IValue(std::make_tuple(0.9, 0.999)));
  group.options.insert("name", "größe");
  group.options.insert("none", c10::IValue());
  group.options.insert("yes", true);
  group.options.insert("list",
                       c10::List<int64_t>({1, -2, 300, 70000, int64_t{1} << 40, INT64_MIN}));
  group.params = {0, 1};
  dict.param_groups.push_back(group);
  group.params = {2};
  dict.param_groups.push_back(group);
  return dict;
}

TEST(StateDict, RoundTrip) {
  Folder folder;
  write_state_dict(sample(), folder / "a.pt");
  auto read = read_state_dict(folder / "a.pt");
  auto expected = sample();
  // A list of ints comes back as Python has it, a list of anything.
  for (auto* dict : {&expected, &read}) {
    for (auto& group : dict->param_groups) {
      auto list = group.options["list"].toList().vec();
      group.options["list"] = c10::ivalue::Tuple::create(list);
    }
  }
  expect_same(expected, read);
  EXPECT_EQ(test::names_in(folder / "").size(), 1u);

  write_state_dict(StateDict{}, folder / "empty.pt");
  expect_same(StateDict{}, read_state_dict(folder / "empty.pt"));
}

TEST(StateDict, SharedStorageIsWrittenOnce) {
  Folder folder;
  auto storage = at::zeros({100000});
  StateDict dict;
  StateDict::ParamGroup group;
  for (int64_t i = 0; i < 10; ++i) {
    dict.state[i].insert("slice", storage.narrow(0, i * 10000, 10000));
    group.params.push_back(i);
  }
  dict.param_groups.push_back(group);
  write_state_dict(dict, folder / "a.pt");
  EXPECT_LT(fs::file_size(folder / "a.pt"), 500000u);
  auto read = read_state_dict(folder / "a.pt");
  EXPECT_TRUE(read.state[0]["slice"].toTensor().is_alias_of(read.state[9]["slice"].toTensor()));
}

TEST(StateDict, EveryDtype) {
  Folder folder;
  StateDict dict;
  dict.param_groups.push_back({NamedValues(), {0}});
  auto& values = dict.state[0];
  for (auto dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
        at::kChar, at::kByte, at::kBool, at::kComplexFloat, at::kComplexDouble}) {
    values.insert(c10::toString(dtype), at::arange(5).to(dtype));
  }
  values.insert("conjugate", at::complex(at::ones({2}), at::ones({2})).conj());
  auto bytes = at::zeros({8}, at::kByte);
  values.insert("bytes", bytes);
  values.insert("same bytes", bytes.view(at::kFloat));
  write_state_dict(dict, folder / "a.pt");
  auto read = read_state_dict(folder / "a.pt");
  expect_same(dict, read);
  EXPECT_FALSE(read.state[0]["conjugate"].toTensor().is_conj());
}

TEST(StateDict, HoldsDtypes) {
  Folder folder;
  StateDict dict;
  auto& group = dict.param_groups.emplace_back();
  group.options.insert("state_dtype", dtype_to_value(at::kBFloat16));
  group.params = {0};
  write_state_dict(dict, folder / "state.pt");
  const auto read = read_state_dict(folder / "state.pt");
  EXPECT_EQ(value_to_dtype(read.param_groups[0].options["state_dtype"]), at::kBFloat16);
  EXPECT_FALSE(value_to_dtype(c10::IValue("bfloat16")).has_value());
}

TEST(StateDict, WriteReplacesWholeOrNotAtAll) {
  Folder folder;
  auto path = folder / "a.pt";
  write_state_dict(sample(), path);
  auto before = read_bytes(path);
  auto intact = [&] {
    return read_bytes(path) == before && test::names_in(folder / "").size() == 1;
  };

  for (const auto& value :
       {c10::IValue(at::Tensor()), c10::IValue(at::eye(2).to_sparse()),
        c10::IValue(c10::complex<double>(1, 1)), c10::IValue(c10::Dict<int64_t, int64_t>())}) {
    auto dict = sample();
    dict.state[0].insert("wrong", value);
    auto message = value_error([&] { write_state_dict(dict, path); });
    EXPECT_NE(message.find("'wrong'"), std::string::npos) << message;
    EXPECT_NE(message.find(path), std::string::npos) << message;
    EXPECT_TRUE(intact());
  }
  auto dict = sample();
  dict.state[3] = dict.state[0];
  value_error([&] { write_state_dict(dict, path); });
  EXPECT_TRUE(intact());

  // Every write past a limit fails as on a full disk.
  struct rlimit old;
  ::getrlimit(RLIMIT_FSIZE, &old);
  auto* old_handler = std::signal(SIGXFSZ, SIG_IGN);
  for (rlim_t limit : {0, 100, 1000, 3000, 6000}) {
    struct rlimit lower = {limit, old.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &lower);
    dict = sample();
    dict.state[0].insert("large", at::ones({1000}));
    std::string message;
    try {
      write_state_dict(dict, path);
    } catch (const c10::Error& error) {
      message = error.what_without_backtrace();
    }
    ::setrlimit(RLIMIT_FSIZE, &old);
    EXPECT_NE(message.find("cannot write " + path), std::string::npos) << limit << message;
    EXPECT_TRUE(intact());
  }
  std::signal(SIGXFSZ, old_handler);

  EXPECT_THROW(write_state_dict(sample(), folder / "missing/a.pt"), c10::Error);
  fs::create_directory(folder / "directory");
  value_error([&] { write_state_dict(sample(), folder / "directory"); });
  EXPECT_EQ(test::names_in(folder / "").size(), 2u);
}

TEST(StateDict, WriteFollowsLinks) {
  Folder folder;
  write_bytes(folder / "real.pt", "old");
  fs::create_symlink(folder / "real.pt", folder / "link.pt");
  write_state_dict(sample(), folder / "link.pt");
  EXPECT_TRUE(fs::is_symlink(folder / "link.pt"));
  EXPECT_EQ(read_state_dict(folder / "real.pt").state.size(), 2u);
}

TEST(StateDict, RefusesWhatIsNoTorchFile) {
  Folder folder;
  write_bytes(folder / "empty", "");
  write_bytes(folder / "text", std::string(5000, 'x') + "\n");
  fs::create_directory(folder / "directory");
  for (const char* name : {"empty", "text", "directory", "missing", "/dev/null"}) {
    auto path = name[0] == '/' ? name : folder / name;
    auto message = value_error([&] { read_state_dict(path); });
    EXPECT_NE(message.find(path), std::string::npos) << message;
  }
}

// Reads the bytes as a file and touches every element of the result.
bool reads(const std::string& path, std::string_view bytes) {
  write_bytes(path, bytes);
  try {
    double sum = 0;
    for (const auto& item : read_state_dict(path).state) {
      for (const auto& value : item.second) {
        if (value.value().isTensor() && value.value().toTensor().numel() < 1000000) {
          sum += at::real(value.value().toTensor()).to(at::kDouble).sum().item<double>();
        }
      }
    }
    static volatile double sink = 0;
    sink = sum;
    return true;
  } catch (const c10::ValueError&) {
    return false;
  }
}

TEST(StateDict, DamagedFilesAreRefusedOrRead) {
  Folder folder;
  write_state_dict(sample(), folder / "a.pt");
  auto bytes = read_bytes(folder / "a.pt");
  for (size_t size = 0; size < bytes.size(); size += 64) {
    EXPECT_FALSE(reads(folder / "b.pt", std::string_view(bytes).substr(0, size))) << size;
  }
  std::mt19937 random(1);
  size_t refused = 0;
  auto flip = [&](size_t position, char mask) {
    auto damaged = bytes;
    damaged[position] ^= mask;
    refused += !reads(folder / "b.pt", damaged);
  };
  // The pickle and the zip's index decide; most of the rest is padding and elements.
  auto pickle_end = bytes.find("PK", 4);
  for (size_t i = 0; i < 1500; ++i) flip(random() % pickle_end, 1 + random() % 255);
  for (size_t i = 0; i < 1500; ++i) flip(random() % bytes.size(), 1 + random() % 255);
  EXPECT_GT(refused, 500u);
}

// State of `params` parameters, each of which has the same dict with `keys` keys.
std::string shared_state(int params, int keys) {
  const auto number = [](int value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const auto text = [&](const std::string& value) {
    return "X" + number(static_cast<int>(value.size())) + value;
  };
  std::string shared = "}(", state = "}(", indices = "](";
  for (int i = 0; i < keys; ++i) shared += text(std::to_string(i)) + "N";
  shared += "uq\x01";
  for (int i = 0; i < params; ++i) {
    state += "J" + number(i) + (i == 0 ? shared : "h\x01");
    indices += "J" + number(i);
  }
  return "\x80\x02}(" + text("state") + state + "u" + text("param_groups") + "](}(" +
         text("params") + indices + "eueu.";
}

// Pickles that no damage makes by chance.
TEST(StateDict, HostilePicklesAreRefused) {
  Folder folder;
  write_state_dict(StateDict{}, folder / "a.pt");
  auto repeat = [](const std::string& part, int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += part;
    return text;
  };
  const std::vector<std::string> pickles = {
      "\x80\x02]q" + std::string("\0", 1) + "h" + std::string("\0", 1) + "a.",  // holds itself
      "\x80\x02)" + repeat("\x85", 100000) + ".",                               // nested deep
      "\x80\x02" + repeat("(", 100000) + ".",
      "\x80\x02" + repeat("]", 100000) + repeat("a", 99999) + ".",
      "\x80\x02)" + repeat("q\x01h\x01\x86", 30) + ".",  // 2^30 parts, by sharing
      shared_state(3000, 3000),
      "\x80\x02"
      "cos\nsystem\nX\x04\0\0\0true\x85R.",
      "\x80\x02X\xff\xff\xff\xff"
      "a.",
      "\x80\x02",
      "\x80\x02.",
      "\x80\x02Q.",
      "\x80\x02R.",
      "\x80\x02u.",
      "\x80\x02h\x01.",
      ""};
  const auto write = [&](const std::string& pickle) {
    caffe2::serialize::PyTorchStreamWriter file(folder / "b.pt");
    file.writeRecord("data.pkl", pickle.data(), pickle.size());
  };
  write(shared_state(3, 3));  // a little sharing is not hostile
  EXPECT_EQ(read_state_dict(folder / "b.pt").state.size(), 3u);
  for (const auto& pickle : pickles) {
    write(pickle);
    auto message = value_error([&] { read_state_dict(folder / "b.pt"); });
    EXPECT_NE(message.find(folder / "b.pt"), std::string::npos) << message;
  }
}

// --- against Python
// -------------------------------------------------------------------------------

constexpr int kSteps = 3;

at::Tensor pattern(at::IntArrayRef shape, int64_t factor, int64_t shift) {
  auto numbers = at::arange(c10::multiply_integers(shape), at::kLong) * factor + shift;
  return (numbers % 11 - 5.5).to(at::kFloat).div(16).reshape(shape);
}

std::vector<at::Tensor> make_params(const LocalOptimizer& local) {
  using Shapes = std::vector<std::vector<int64_t>>;
  const auto shapes = local.name == "Muon" ? Shapes{{3, 4}, {5, 2}, {4, 4}, {4, 3}, {2, 2}}
                                           : Shapes{{3, 4}, {5}, {}, {4, 3}, {2}};
  std::vector<at::Tensor> params;
  for (size_t i = 0; i < shapes.size(); ++i) params.push_back(pattern(shapes[i], 3, i));
  params[3] = params[3].t();
  for (auto& param : params) param.requires_grad_(true);
  return params;
}

// Two groups, the second at half the learning rate.
std::vector<torch::optim::OptimizerParamGroup> make_groups(const LocalOptimizer& local,
                                                           const std::vector<at::Tensor>& params) {
  auto options = local.defaults->clone();
  options->set_lr(options->get_lr() / 2);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>(params.begin(), params.begin() + 2));
  groups.emplace_back(std::vector<at::Tensor>(params.begin() + 2, params.end()),
                      std::move(options));
  return groups;
}

void train(torch::optim::Optimizer& optimizer, std::vector<at::Tensor>& params, int first) {
  for (int step = first; step < first + kSteps; ++step) {
    for (size_t i = 0; i < 4; ++i) {
      params[i].mutable_grad() =
          at::empty_like(params[i]).copy_(pattern(params[i].sizes(), step + 3, 5 * i));
    }
    optimizer.step();
  }
}

void save_params(const std::vector<at::Tensor>& params, const std::string& path) {
  StateDict dict;
  dict.param_groups.emplace_back();
  for (size_t i = 0; i < params.size(); ++i) {
    dict.state[i].insert("param", params[i].detach());
    dict.param_groups[0].params.push_back(i);
  }
  write_state_dict(dict, path);
}

std::vector<at::Tensor> load_params(const std::string& path) {
  std::vector<at::Tensor> params;
  for (const auto& item : read_state_dict(path).state) {
    params.push_back(item.second["param"].toTensor().requires_grad_(true));
  }
  return params;
}

// How far C++ and Python are apart after kSteps steps from the same state: they divide and take
// roots in another order.
void expect_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::allclose(a[i], b[i], 1e-6, 1e-7)) << i << "\n" << a[i] << b[i];
  }
}

struct Case {
  std::string name;
  LocalOptimizer local;
};

template <class Options>
Options adam_options() {
  return Options(0.01).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1);
}

// As in state_dict_peer.py.
std::vector<Case> cases() {
  using torch::optim::AdagradOptions, torch::optim::AdamOptions, torch::optim::AdamWOptions,
      torch::optim::RMSpropOptions, torch::optim::SGDOptions;
  return {
      {"adam", local_optimizer(adam_options<AdamOptions>())},
      {"adam_amsgrad", local_optimizer(adam_options<AdamOptions>().amsgrad(true))},
      {"adamw", local_optimizer(adam_options<AdamWOptions>())},
      {"adamw_amsgrad", local_optimizer(adam_options<AdamWOptions>().amsgrad(true))},
      {"sgd", local_optimizer(SGDOptions(0.1))},
      {"sgd_momentum",
       local_optimizer(SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.1))},
      {"sgd_nesterov", local_optimizer(SGDOptions(0.1).momentum(0.9).nesterov(true))},
      {"adagrad",
       local_optimizer(
           AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.1))},
      {"rmsprop", local_optimizer(RMSpropOptions(0.01).alpha(0.9))},
      {"rmsprop_centered",
       local_optimizer(
           RMSpropOptions(0.01).alpha(0.9).eps(1e-6).weight_decay(0.1).momentum(0.9).centered(
               true))},
      {"muon", local_optimizer(optim::MuonOptions(0.02).momentum(0.9))},
      {"muon_rms",
       local_optimizer(
           optim::MuonOptions(0.02).nesterov(false).ns_steps(4).adjust_lr_fn("match_rms_adamw"))},
  };
}

void run_peer(const std::string& folder) {
  const char* python = std::getenv("SHARDSTEP_PYTHON");
  std::string command = "timeout -k 5 200 '" + std::string(python ? python : SHARDSTEP_PYTHON) +
                        "' '" SHARDSTEP_TEST_SOURCE_DIR "/format/state_dict_peer.py' '" + folder +
                        "' > '" + folder + "/log' 2>&1";
  ASSERT_EQ(std::system(command.c_str()), 0) << command << "\n" << read_bytes(folder + "/log");
}

// Runs body(optimizer, params) on two ranks, with params from make() on each.
void with_zero(
    const LocalOptimizer& local, Sharding sharding,
    const std::function<std::vector<at::Tensor>()>& make,
    const std::function<void(ZeroRedundancyOptimizer&, std::vector<at::Tensor>&)>& body) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make();
    ZeroRedundancyOptimizer zero(make_groups(local, params), local,
                                 ZeroOptions().process_group(group).sharding(sharding));
    body(zero, params);
  });
}

constexpr Sharding kShardings[] = {Sharding::kParameter, Sharding::kElement};

// Two ranks go on from <prefix>_state.pt as Python did; what they consolidate at once is the state
// that was in the file, bit for bit.
void expect_goes_on(const LocalOptimizer& local, const std::string& prefix) {
  const auto state = read_state_dict(prefix + "_state.pt");
  for (auto sharding : kShardings) {
    if (sharding == Sharding::kElement && !local.elementwise) continue;
    with_zero(
        local, sharding, [&] { return load_params(prefix + "_params.pt"); },
        [&](ZeroRedundancyOptimizer& zero, std::vector<at::Tensor>& params) {
          for (auto& group : zero.param_groups()) group.options().set_lr(123.0);
          zero.load_state_dict(state);
          if (const auto kept = zero.consolidate_state_dict(1)) {
            ASSERT_EQ(kept->state.size(), state.state.size());
            for (const auto& [index, values] : kept->state) {
              expect_same_values(values, state.state.at(index));
            }
          }
          train(zero, params, kSteps);
          expect_close(params, load_params(prefix + "_result.pt"));
        });
  }
}

// One Python process does all cases: its start costs more than they do.
TEST(StateDict, PythonGoesOnFromOursAndWeFromPythons) {
  Folder folder;
  size_t number = 0;
  for (const auto& [name, local] : cases()) {
    fs::create_directory(folder / name);
    const auto sharding = local.elementwise ? kShardings[number++ % 2] : Sharding::kParameter;
    with_zero(
        local, sharding, [&local = local] { return make_params(local); },
        [&, name = name](ZeroRedundancyOptimizer& zero, std::vector<at::Tensor>& params) {
          train(zero, params, 0);
          if (const auto dict = zero.consolidate_state_dict(0)) {
            write_state_dict(*dict, folder / (name + "/ours_state.pt"));
            save_params(params, folder / (name + "/ours_params.pt"));
          }
        });
  }
  ASSERT_NO_FATAL_FAILURE(run_peer(folder / ""));

  for (const auto& [name, local] : cases()) {
    SCOPED_TRACE(name);
    expect_goes_on(local, folder / (name + "/ours"));
    expect_goes_on(local, folder / (name + "/theirs"));
  }
  for (const char* name : {"adamw_fused", "adamw_tensor_lr"}) {
    SCOPED_TRACE(name);
    expect_goes_on(local_optimizer(torch::optim::AdamWOptions()),
                   folder / (std::string(name) + "/theirs"));
  }

  size_t bad = 0;
  for (const auto& file : fs::directory_iterator(folder / "bad")) {
    SCOPED_TRACE(file.path());
    auto message = value_error([&] { read_state_dict(file.path()); });
    EXPECT_NE(message.find(file.path()), std::string::npos) << message;
    ++bad;
  }
  EXPECT_EQ(bad, 24u);

  // Numbered by position, whatever numbers the file has.
  auto odd = read_state_dict(folder / "odd.pt");
  ASSERT_EQ(odd.param_groups.size(), 3u);
  EXPECT_EQ(odd.param_groups[0].params, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(odd.param_groups[1].params, (std::vector<int64_t>{2}));
  EXPECT_EQ(odd.param_groups[0].options["big"].toInt(), int64_t{1} << 40);
  EXPECT_EQ(odd.param_groups[0].options["negative"].toInt(), -5);
  EXPECT_EQ(odd.param_groups[0].options["many"].toInt(), 300);
  EXPECT_EQ(odd.param_groups[1].options["betas"].toList().vec()[1].toDouble(), 0.99);
  const auto& values = odd.state.at(2);
  EXPECT_TRUE(at::equal(values["a"].toTensor(), at::arange(2, 6, at::kFloat)));
  EXPECT_EQ(values["b"].toTensor().strides(), (std::vector<int64_t>{1, 3}));
  EXPECT_TRUE(values["a"].toTensor().is_alias_of(values["b"].toTensor()));
}

}  // namespace
}  // namespace shardstep
