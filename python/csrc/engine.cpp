// ShardEngine for Python. Every call that may wait releases the GIL; C++ errors and warnings become
// Python's.

#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>

#include "bindings.h"
#include "comm/collectives.h"
#include "launch/who.h"
#include "shard/gradient_clipping.h"
#include "shard/gradient_lending.h"
#include "shard/shard_engine.h"
#include "shard/state_matching.h"
#include "shard/state_transfer.h"

namespace shardstep::python {
namespace {

template <class Value>
using Choices = std::vector<std::pair<std::string, Value>>;

template <class Value>
Value choose(const char* what, const Choices<Value>& choices, const std::string& name) {
  std::string names;
  for (const auto& [choice, value] : choices) {
    if (choice == name) return value;
    names += (names.empty() ? "'" : ", '") + choice + "'";
  }
  TORCH_CHECK_VALUE(false, "shardstep: expected ", what, " to be one of ", names, ", got '", name,
                    "'");
}

Sharding sharding_named(const std::string& name) {
  return choose<Sharding>(
      "sharding", {{"parameter", Sharding::kParameter}, {"element", Sharding::kElement}}, name);
}

EngineOptions options_of(std::optional<Stage2Options> stage2, const std::string& sharding,
                         const std::string& exchange, bool flat,
                         std::optional<double> bucket_cap_mb, bool overlap,
                         std::optional<at::ScalarType> master_dtype, const std::string& rounding) {
  return {.stage2 = stage2,
          .sharding = sharding_named(sharding),
          .storage = flat ? BucketStorage::kFlat : BucketStorage::kInPlace,
          .exchange = choose<ExchangeKind>("exchange",
                                           {{"auto", ExchangeKind::kAuto},
                                            {"native", ExchangeKind::kNative},
                                            {"pairwise", ExchangeKind::kPairwise},
                                            {"shared_memory", ExchangeKind::kSharedMemory},
                                            {"hierarchical", ExchangeKind::kHierarchical}},
                                           exchange),
          .bucket_cap_mb = bucket_cap_mb,
          .overlap = overlap,
          .master_dtype = master_dtype,
          .rounding = choose<Rounding>(
              "rounding", {{"nearest", Rounding::kNearest}, {"stochastic", Rounding::kStochastic}},
              rounding)};
}

using PyValue = std::variant<at::Tensor, py::bytes>;
using PyState = std::map<int64_t, std::vector<std::pair<std::string, PyValue>>>;

EngineState from_python(const PyState& state) {
  EngineState values;
  for (const auto& [index, items] : state) {
    auto& param = values[index];
    for (const auto& [name, value] : items) {
      if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
        param.push_back({name, *tensor, {}});
      } else {
        param.push_back({name, {}, std::get<py::bytes>(value)});
      }
    }
  }
  return values;
}

PyState to_python(const EngineState& state) {
  PyState values;
  for (const auto& [index, param] : state) {
    auto& items = values[index];
    for (const auto& value : param) {
      if (value.tensor.defined()) {
        items.emplace_back(value.name, value.tensor);
      } else {
        items.emplace_back(value.name, py::bytes(value.bytes));
      }
    }
  }
  return values;
}

using PyGradients = std::vector<std::pair<int64_t, at::Tensor>>;

std::vector<ParamGradient> gradients_of(const PyGradients& pairs) {
  std::vector<ParamGradient> gradients;
  for (const auto& [index, gradient] : pairs) gradients.push_back({index, gradient});
  return gradients;
}

// One tensor per rank; none for a bucket whose parameters stay where they are.
std::vector<std::vector<at::Tensor>> flat_buckets(const ShardEngine& engine) {
  std::vector<std::vector<at::Tensor>> buckets;
  for (const auto& bucket : engine.buckets()) {
    if (!bucket.flat().defined()) continue;
    auto& shards = buckets.emplace_back();
    for (const auto& shard : bucket.layout().shards) {
      shards.push_back(bucket.flat().narrow(0, shard.begin, shard.size()));
    }
  }
  return buckets;
}

void add_groups(
    ShardEngine& engine,
    const std::vector<std::tuple<std::vector<at::Tensor>, std::string, std::vector<std::string>,
                                 std::vector<double>, int64_t, std::string>>& groups,
    const std::optional<std::string>& error,
    const std::function<std::optional<std::string>()>& use) {
  std::vector<EngineGroup> engine_groups;
  for (const auto& [params, description, names, costs, cost_pool, sharding] : groups) {
    engine_groups.push_back(
        {params, description, names, costs, cost_pool, sharding_named(sharding)});
  }
  engine.add_groups(engine_groups,
                    error ? std::make_exception_ptr(std::runtime_error(*error)) : nullptr, [&use] {
                      if (const auto failure = use()) throw std::runtime_error(*failure);
                    });
}

// Parameters as (elements, bytes of an element, kind). Returns what each rank owns, as (parameter,
// elements), and the bytes of each bucket. Needs no process group.
using RankShares = std::vector<std::pair<int64_t, int64_t>>;
std::pair<std::vector<RankShares>, std::vector<int64_t>> partition(
    const std::string& sharding, int world_size, int64_t bucket_cap_bytes,
    const std::vector<std::tuple<int64_t, int64_t, int64_t>>& params) {
  std::vector<ParamSpec> specs;
  for (const auto& [numel, element_size, kind] : params) {
    specs.push_back({.numel = numel, .element_size = element_size, .kind = kind});
  }
  Partition parts(sharding_named(sharding), world_size, bucket_cap_bytes);
  parts.add_groups({specs});
  std::vector<RankShares> shares(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    for (const auto& slice : parts.owned(rank, 0)) {
      shares[rank].emplace_back(slice.param, slice.elements.size());
    }
  }
  std::vector<int64_t> bucket_bytes;
  for (const auto& bucket : parts.buckets()) {
    bucket_bytes.push_back(bucket.numel() * specs[bucket.slots.front().param].element_size);
  }
  return {shares, bucket_bytes};
}

// By name: how often, and how many seconds.
std::map<std::string, std::pair<int64_t, double>> phase_times(const ShardEngine& engine) {
  std::map<std::string, std::pair<int64_t, double>> times;
  for (size_t p = 0; p < kStepPhases; ++p) {
    const auto phase = static_cast<StepPhase>(p);
    const auto [calls, time] = engine.phase_times()[phase];
    times[phase_name(phase)] = {calls, std::chrono::duration<double>(time).count()};
  }
  return times;
}

// A context in which Python runs the local optimizer.
struct UpdateTimer {
  std::shared_ptr<ShardEngine> engine;
  std::optional<PhaseTimer> timer;
};

void bind_update_timer(py::module_& module) {
  py::class_<UpdateTimer>(module, "UpdateTimer")
      .def(py::init([](std::shared_ptr<ShardEngine> engine) {
             return std::make_unique<UpdateTimer>(std::move(engine), std::nullopt);
           }),
           py::arg("engine"))
      .def("__enter__",
           [](UpdateTimer& self) {
             self.timer.emplace(self.engine->phase_times(), StepPhase::kUpdate);
           })
      .def("__exit__", [](UpdateTimer& self, const py::args&) { self.timer.reset(); });
}

// As a shared_ptr, null becomes None in a group of one.
std::shared_ptr<Pending> after_partial_step(ShardEngine& engine, const PyGradients& gradients,
                                            int tag) {
  return engine.after_partial_step(gradients_of(gradients), tag);
}

PyState gather_state(ShardEngine& engine, const PyState& local, int to) {
  const auto own = from_python(local);
  EngineState whole;
  {
    const py::gil_scoped_release no_gil;
    whole = shardstep::gather_state(engine, own, to);
  }
  return to_python(whole);
}

PyState cut_state(ShardEngine& engine, const PyState& whole) {
  return to_python(shardstep::cut_state(engine, from_python(whole)));
}

void bind_values(py::module_& module) {
  py::class_<LocalParam>(module, "LocalParam")
      .def_readonly("index", &LocalParam::index)
      .def_property_readonly("begin", [](const LocalParam& p) { return p.elements.begin; })
      .def_property_readonly("end", [](const LocalParam& p) { return p.elements.end; })
      .def_readonly("tensor", &LocalParam::tensor);
  py::class_<Slice>(module, "Slice")
      .def_readonly("param", &Slice::param)
      .def_readonly("rank", &Slice::rank)
      .def_property_readonly("begin", [](const Slice& s) { return s.elements.begin; })
      .def_property_readonly("end", [](const Slice& s) { return s.elements.end; });
  py::class_<Traffic>(module, "Traffic")
      .def_readonly("bytes_sent", &Traffic::bytes_sent)
      .def_readonly("bytes_received", &Traffic::bytes_received)
      .def_readonly("bytes_shared", &Traffic::bytes_shared);
  py::class_<Pending, std::shared_ptr<Pending>>(module, "Pending")
      .def("wait", torch::wrap_pybind_function_no_gil([](Pending& pending) { pending.wait(); }));
}

GradientStatistic statistic_named(const std::string& name) {
  return choose<GradientStatistic>("a statistic",
                                   {{"norm", GradientStatistic::kNorm},
                                    {"sum", GradientStatistic::kSum},
                                    {"largest", GradientStatistic::kLargest},
                                    {"smallest", GradientStatistic::kSmallest},
                                    {"nans", GradientStatistic::kNans},
                                    {"infinities", GradientStatistic::kInfinities}},
                                   name);
}

bool all_finite(ShardedGradients& gradients, const std::vector<int64_t>& params) {
  const auto finite = gradients.finite();
  return std::all_of(params.begin(), params.end(), [&](int64_t param) { return finite[param]; });
}

std::optional<at::Tensor> defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

using PyMasters = std::map<int64_t, std::optional<at::Tensor>>;

std::map<int64_t, at::Tensor> masters_of(const PyMasters& given) {
  std::map<int64_t, at::Tensor> masters;
  for (const auto& [index, tensor] : given) masters.emplace(index, tensor.value_or(at::Tensor()));
  return masters;
}

void bind_gradients(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  using Params = std::vector<int64_t>;
  using Limit = std::optional<double>;
  py::class_<ShardedGradients>(module, "ShardedGradients")
      .def("statistic", wrap_pybind_function_no_gil([](ShardedGradients& gradients, int64_t param,
                                                       const std::string& name, double norm_type) {
             return gradients.statistic(statistic_named(name), norm_type).at(param);
           }))
      .def("all_finite", wrap_pybind_function_no_gil(all_finite))
      .def("whole", wrap_pybind_function_no_gil(
                        [](ShardedGradients& gradients, std::optional<int64_t> param) {
                          return defined(gradients.whole(param));
                        }))
      .def("own", wrap_pybind_function_no_gil([](ShardedGradients& gradients, int64_t param) {
             return defined(gradients.own(param));
           }))
      .def("changed", wrap_pybind_function_no_gil(
                          [](ShardedGradients& gradients, int64_t param, const std::string& how) {
                            gradients.changed(param, how);
                          }))
      .def("scale",
           wrap_pybind_function_no_gil([](ShardedGradients& gradients, const Params& params,
                                          double factor) { gradients.scale(params, factor); }))
      .def("clamp", wrap_pybind_function_no_gil(
                        [](ShardedGradients& gradients, const Params& params, Limit min,
                           Limit max) { gradients.clamp(params, min, max); }))
      .def("zero", wrap_pybind_function_no_gil(
                       [](ShardedGradients& gradients, int64_t param) { gradients.zero(param); }))
      .def("zero_all",
           wrap_pybind_function_no_gil([](ShardedGradients& gradients) { gradients.zero_all(); }));
}

}  // namespace

void bind_engine(py::module_& module) {
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;
  bind_values(module);
  bind_gradients(module);
  module.def("partition", wrap_pybind_function_no_gil(partition), py::arg("sharding"),
             py::arg("world_size"), py::arg("bucket_cap_bytes"), py::arg("params"));
  module.def("broadcast", wrap_pybind_function_no_gil(detail::broadcast), py::arg("group"),
             py::arg("tensors"), py::arg("source") = 0);
  module.def("default_bucket_cap_mb", &default_bucket_cap_mb, py::arg("world_size"));
  py::class_<ShardEngine, std::shared_ptr<ShardEngine>>(module, "ShardEngine")
      .def(py::init(wrap_pybind_function(
               [](ProcessGroupPtr group, int stage, const std::string& sharding,
                  const std::string& exchange, bool flat, std::optional<double> bucket_cap_mb,
                  bool overlap, bool share_parameters, bool overlap_forward,
                  std::optional<at::ScalarType> gradient_dtype,
                  std::optional<at::ScalarType> master_dtype, const std::string& rounding) {
                 const auto stage2 = stage2_options(
                     stage, {share_parameters, overlap_forward, gradient_dtype}, group);
                 return std::make_shared<ShardEngine>(
                     group, options_of(stage2, sharding, exchange, flat, bucket_cap_mb, overlap,
                                       master_dtype, rounding));
               })),
           py::arg("group"), py::kw_only(), py::arg("stage") = 1, py::arg("sharding") = "parameter",
           py::arg("exchange") = "auto", py::arg("flat") = false,
           py::arg("bucket_cap_mb") = py::none(), py::arg("overlap") = false,
           py::arg("share_parameters") = false, py::arg("overlap_forward") = false,
           py::arg("gradient_dtype") = py::none(), py::arg("master_dtype") = py::none(),
           py::arg("rounding") = "nearest")
      .def("add_groups", wrap_pybind_function_no_gil(add_groups), py::arg("groups"),
           py::arg("error"), py::arg("use"))
      .def("lend_gradients", wrap_pybind_function_no_gil([](ShardEngine& engine, bool has) {
             lend_gradients(engine, has);
           }))
      .def("before_step", wrap_pybind_function_no_gil([](ShardEngine& e) { e.before_step(); }))
      .def("fail_step", wrap_pybind_function_no_gil([](ShardEngine& e, const std::string& message) {
             e.fail_step(std::make_exception_ptr(std::runtime_error(message)));
           }))
      .def("before_closure",
           wrap_pybind_function_no_gil([](ShardEngine& e) { e.before_closure(); }))
      .def("round_copies", wrap_pybind_function_no_gil([](ShardEngine& e) { e.round_copies(); }))
      .def("updates_copy", &ShardEngine::updates_copy)
      .def("has_master", &ShardEngine::has_master)
      .def("saved_master", wrap_pybind_function([](const ShardEngine& engine, int64_t param) {
             return defined(engine.saved_master(param));
           }))
      .def("load_masters", wrap_pybind_function([](ShardEngine& engine, const PyMasters& masters) {
             engine.load_masters(masters_of(masters));
           }))
      .def("widen_params", wrap_pybind_function([](ShardEngine& engine, const PyMasters& masters) {
             widen_params(engine.params(), masters_of(masters));
           }))
      .def("widen_own_params",
           wrap_pybind_function_no_gil([](ShardEngine& engine, const PyMasters& masters) {
             engine.widen_own_params(masters_of(masters));
           }))
      .def("end_partial_steps",
           wrap_pybind_function_no_gil([](ShardEngine& e, const std::optional<std::string>& error) {
             e.end_partial_steps(error ? std::make_exception_ptr(std::runtime_error(*error))
                                       : nullptr);
           }))
      .def("after_step", wrap_pybind_function_no_gil([](ShardEngine& e) { e.after_step(); }))
      .def("wait", wrap_pybind_function_no_gil([](ShardEngine& e) { e.wait(); }))
      .def("wait_for",
           wrap_pybind_function_no_gil(
               [](ShardEngine& e, const std::vector<int64_t>& params) { e.wait(params); }))
      .def("before_partial_step",
           wrap_pybind_function_no_gil([](ShardEngine& engine, const PyGradients& gradients) {
             engine.before_partial_step(gradients_of(gradients));
           }))
      // What is under way still uses the engine's exchange.
      .def("after_partial_step", wrap_pybind_function_no_gil(after_partial_step),
           py::keep_alive<0, 1>())
      .def("set_announce", &ShardEngine::set_announce)
      .def("set_joined", &ShardEngine::set_joined)
      .def("end_join", wrap_pybind_function_no_gil(&ShardEngine::end_join))
      .def("drop_sums", wrap_pybind_function_no_gil([](ShardEngine& e) { e.drop_sums(); }))
      .def_property_readonly("gradients", &ShardEngine::gradients,
                             py::return_value_policy::reference_internal)
      .def_property_readonly("replaced_gradient", &ShardEngine::replaced_gradient)
      .def("set_stand_in",
           wrap_pybind_function([](ShardEngine& engine, int64_t param, const at::Tensor& stand_in) {
             engine.set_stand_in(param, stand_in);
           }))
      .def("show_gradients", wrap_pybind_function([](ShardEngine& e) { e.show_gradients(); }))
      .def("clip_grad_norm",
           wrap_pybind_function_no_gil(
               [](ShardEngine& engine, double max_norm, double norm_type, bool error_if_nonfinite) {
                 return clip_grad_norm(engine, max_norm, norm_type, error_if_nonfinite);
               }))
      .def("clip_grad_value", wrap_pybind_function_no_gil([](ShardEngine& engine, double value) {
             clip_grad_value(engine, value);
           }))
      .def_property(
          "sync", &ShardEngine::sync,
          wrap_pybind_function([](ShardEngine& engine, bool sync) { engine.set_sync(sync); }))
      .def("gather_state", wrap_pybind_function(gather_state))
      .def("cut_state", wrap_pybind_function(cut_state))
      .def("match_params",
           wrap_pybind_function([](const ShardEngine& engine, const detail::GroupParams& saved,
                                   const detail::GroupParams& ours) {
             return detail::match_params(saved, ours, detail::who(engine.process_group()));
           }),
           py::arg("saved"), py::arg("ours"))
      .def("check_state_shape",
           wrap_pybind_function([](const ShardEngine& engine, const std::string& key,
                                   const std::vector<int64_t>& shape, int64_t index,
                                   bool known_elementwise) {
             detail::check_state_shape(key, shape, index, engine.param(index), known_elementwise,
                                       detail::who(engine.process_group()));
           }),
           py::arg("key"), py::arg("shape"), py::arg("index"), py::arg("known_elementwise"))
      .def("local_params", [](const ShardEngine& e, size_t group) { return e.local_params(group); })
      .def("owned", [](const ShardEngine& engine, int rank,
                       size_t group) { return engine.partition().owned(rank, group); })
      .def("owners", [](const ShardEngine& engine,
                        int64_t param) { return engine.partition().slices(param); })
      .def("owned_elements", [](const ShardEngine& engine,
                                int rank) { return engine.partition().owned_elements(rank); })
      .def("flat_buckets", flat_buckets)
      .def("phase_times", phase_times)
      .def("reset_phase_times", [](const ShardEngine& e) { e.phase_times().reset(); })
      .def_property_readonly("gradient_bytes", &ShardEngine::gradient_bytes)
      .def_property_readonly("bucket_count",
                             [](const ShardEngine& e) { return e.buckets().size(); })
      .def_property_readonly("traffic", &ShardEngine::traffic)
      .def_property_readonly("exchange", &ShardEngine::exchange_name)
      .def_property_readonly("any_order", &ShardEngine::any_order);
  bind_update_timer(module);
}

}  // namespace shardstep::python
