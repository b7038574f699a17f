#include "shardstep/local_optimizer.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <sstream>

#include "format/param_group_keys.h"
#include "shardstep/optim/adagrad.h"
#include "shardstep/optim/adam.h"
#include "shardstep/optim/adamw.h"
#include "shardstep/optim/sgd.h"

namespace shardstep {

namespace {

namespace torch_optim = torch::optim;

using detail::is_foreign;

bool is_harmless(const c10::IValue& value) {
  return value.isNone() || (value.isBool() && !value.toBool());
}

std::string show(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? "a tensor" : "an undefined tensor";
  if (value.isBool()) return value.toBool() ? "True" : "False";
  std::ostringstream text;
  text << value;
  return text.str();
}

[[noreturn]] void refuse(const std::string& name, const std::string& expected,
                         const c10::IValue& value) {
  TORCH_CHECK_VALUE(false, "shardstep: expected '", name, "' to be ", expected, ", got ",
                    show(value));
}

double to_double(const std::string& name, const c10::IValue& value) {
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1 &&
      !value.toTensor().is_complex()) {
    return value.toTensor().item().toDouble();
  }
  refuse(name, "a number", value);
}

// Conversions between C++ values and their Python form.
void from_value(const std::string& name, const c10::IValue& value, double& to) {
  to = to_double(name, value);
}
void from_value(const std::string& name, const c10::IValue& value, bool& to) {
  if (!value.isBool()) refuse(name, "True or False", value);
  to = value.toBool();
}
void from_value(const std::string& name, const c10::IValue& value, int64_t& to) {
  auto number = to_double(name, value);
  if (!(number >= 0 && number < 9e18 && number == std::floor(number))) {
    refuse(name, "a whole number", value);
  }
  to = static_cast<int64_t>(number);
}
void from_value(const std::string& name, const c10::IValue& value, std::tuple<double, double>& to) {
  std::vector<c10::IValue> pair;
  if (value.isTuple()) pair = value.toTupleRef().elements().vec();
  if (value.isList()) pair = value.toList().vec();
  if (pair.size() != 2) refuse(name, "a tuple of two numbers", value);
  to = {to_double(name, pair[0]), to_double(name, pair[1])};
}
void from_value(const std::string& name, const c10::IValue& value,
                std::tuple<double, double, double>& to) {
  std::vector<c10::IValue> items;
  if (value.isTuple()) items = value.toTupleRef().elements().vec();
  if (value.isList()) items = value.toList().vec();
  if (items.size() != 3) refuse(name, "a tuple of three numbers", value);
  to = {to_double(name, items[0]), to_double(name, items[1]), to_double(name, items[2])};
}
void from_value(const std::string& name, const c10::IValue& value, std::optional<std::string>& to) {
  if (!value.isNone() && !value.isString()) refuse(name, "a string or None", value);
  to = value.isString() ? std::optional(value.toStringRef()) : std::nullopt;
}
void from_value(const std::string& name, const c10::IValue& value, at::Tensor& to) {
  if (!value.isNone() && !value.isTensor()) refuse(name, "a tensor", value);
  to = value.isTensor() ? value.toTensor() : at::Tensor();
}

c10::IValue to_value(double value) { return value; }
c10::IValue to_value(bool value) { return value; }
c10::IValue to_value(const std::tuple<double, double>& value) { return value; }
c10::IValue to_value(const std::tuple<double, double, double>& value) { return value; }
c10::IValue to_value(const std::optional<std::string>& value) { return value; }
c10::IValue to_value(const at::Tensor& value) { return value; }
// Python keeps step counters as tensors.
c10::IValue to_value(int64_t value) {
  return at::scalar_tensor(static_cast<double>(value), at::kFloat);
}

// One key of a param group or of a parameter's state, as Python has it.
template <class Owner>
struct Field {
  std::string name;
  std::function<c10::IValue(const Owner&)> read;
  std::function<void(const c10::IValue&, Owner&)> write;
  bool required = true;
};
template <class Owner>
using Fields = std::vector<Field<Owner>>;

// A field of Owner, by its TORCH_ARG accessor.
template <class Owner, class T>
Field<Owner> field(std::string name, T& (Owner::*access)() noexcept) {
  auto read = [access](const Owner& owner) {
    return to_value((const_cast<Owner&>(owner).*access)());
  };
  auto write = [name, access](const c10::IValue& value, Owner& owner) {
    from_value(name, value, (owner.*access)());
  };
  return {name, read, write};
}

// An int that is one in Python too.
template <class Owner>
Field<Owner> int_field(std::string name, int64_t& (Owner::*access)() noexcept) {
  auto made = field(std::move(name), access);
  made.read = [access](const Owner& owner) {
    return c10::IValue((const_cast<Owner&>(owner).*access)());
  };
  return made;
}

// A field that may be missing from options.
template <class Owner>
Field<Owner> optional(Field<Owner> field) {
  field.required = false;
  return field;
}

// A key that C++ lacks and that changes results: it must have the value that C++ assumes.
template <class Owner>
Field<Owner> fixed(const std::string& name, bool meaning) {
  auto write = [name, meaning](const c10::IValue& value, Owner&) {
    bool same = value.isBool() ? value.toBool() == meaning : value.isNone() && !meaning;
    if (!same) refuse(name, meaning ? "True" : "False", value);
  };
  return {name, [meaning](const Owner&) { return c10::IValue(meaning); }, write, false};
}

// A key that C++ lacks and that changes only how the results are computed.
template <class Owner>
Field<Owner> hint(const std::string& name, c10::IValue usual) {
  auto write = [name](const c10::IValue& value, Owner&) {
    if (!value.isBool() && !value.isNone()) refuse(name, "True, False or None", value);
  };
  return {name, [usual](const Owner&) { return usual; }, write, false};
}

template <class Owner>
NamedValues read_fields(const Fields<Owner>& fields, const Owner& owner) {
  NamedValues values;
  for (const auto& field : fields) {
    auto value = field.read(owner);
    if (!value.isTensor() || value.toTensor().defined()) values.insert(field.name, value);
  }
  return values;
}

template <class Owner>
void write_fields(const Fields<Owner>& fields, const NamedValues& values, Owner& owner,
                  const std::string& what) {
  Owner next(owner);
  for (const auto& field : fields) {
    const auto* value = values.find(field.name);
    TORCH_CHECK_VALUE(value || !field.required, "shardstep: expected ", what, " to have '",
                      field.name, "'");
    if (value) field.write(*value, next);
  }
  for (const auto& item : values) {
    bool known = std::any_of(fields.begin(), fields.end(),
                             [&](const auto& field) { return field.name == item.key(); });
    TORCH_CHECK_VALUE(known || is_foreign(item.key()) || is_harmless(item.value()),
                      "shardstep: ", what, " has no '", item.key(), "', got ", show(item.value()),
                      " for it");
  }
  owner = std::move(next);
}

template <class Optimizer, class ParamState, class Options>
LocalOptimizer named_optimizer(const std::string& name, const Options& defaults,
                               Fields<Options> options_fields, Fields<ParamState> state_fields) {
  auto local = detail::base_optimizer<Optimizer, Options>(defaults, name);
  local.elementwise = is_known_elementwise(name);
  auto options = std::make_shared<const Fields<Options>>(std::move(options_fields));
  auto state = std::make_shared<const Fields<ParamState>>(std::move(state_fields));
  local.read_options = [name, options](const torch_optim::OptimizerOptions& from) {
    return read_fields(*options, detail::downcast<const Options>(from, name));
  };
  local.write_options = [name, options](const NamedValues& values,
                                        torch_optim::OptimizerOptions& to) {
    write_fields(*options, values, detail::downcast<Options>(to, name), name + "'s options");
  };
  local.read_state = [name, state](const torch_optim::OptimizerParamState& from) {
    return read_fields(*state, detail::downcast<const ParamState>(from, name));
  };
  local.write_state = [name, state](const NamedValues& values) {
    auto made = std::make_unique<ParamState>();
    write_fields(*state, values, *made, name + "'s state");
    return made;
  };
  return local;
}

// Adam and AdamW differ only in the meaning of weight decay.
template <class Options>
Fields<Options> adam_options(bool decoupled_weight_decay) {
  return {field("lr", &Options::lr),
          field("betas", &Options::betas),
          field("eps", &Options::eps),
          field("weight_decay", &Options::weight_decay),
          field("amsgrad", &Options::amsgrad),
          fixed<Options>("maximize", false),
          hint<Options>("foreach", {}),
          hint<Options>("capturable", false),
          fixed<Options>("differentiable", false),
          hint<Options>("fused", {}),
          fixed<Options>("decoupled_weight_decay", decoupled_weight_decay)};
}

template <class State>
Fields<State> adam_state() {
  return {field("step", &State::step), field("exp_avg", &State::exp_avg),
          field("exp_avg_sq", &State::exp_avg_sq),
          optional(field("max_exp_avg_sq", &State::max_exp_avg_sq))};
}

}  // namespace

bool is_known_elementwise(std::string_view name) {
  static constexpr std::array<std::string_view, 11> kNames = {
      "ASGD",  "Adadelta", "Adagrad", "Adam",  "AdamW", "Adamax",
      "NAdam", "RAdam",    "RMSprop", "Rprop", "SGD"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

LocalOptimizer local_optimizer(const torch_optim::AdamOptions& defaults) {
  return named_optimizer<optim::Adam, torch_optim::AdamParamState>(
      "Adam", defaults, adam_options<torch_optim::AdamOptions>(false),
      adam_state<torch_optim::AdamParamState>());
}

LocalOptimizer local_optimizer(const torch_optim::AdamWOptions& defaults) {
  return named_optimizer<optim::AdamW, torch_optim::AdamWParamState>(
      "AdamW", defaults, adam_options<torch_optim::AdamWOptions>(true),
      adam_state<torch_optim::AdamWParamState>());
}

LocalOptimizer local_optimizer(const torch_optim::SGDOptions& defaults) {
  using Options = torch_optim::SGDOptions;
  using State = torch_optim::SGDParamState;
  return named_optimizer<optim::SGD, State>(
      "SGD", defaults,
      {field("lr", &Options::lr), field("momentum", &Options::momentum),
       field("dampening", &Options::dampening), field("weight_decay", &Options::weight_decay),
       field("nesterov", &Options::nesterov), fixed<Options>("maximize", false),
       hint<Options>("foreach", {}), fixed<Options>("differentiable", false),
       hint<Options>("fused", {})},
      {optional(field("momentum_buffer", &State::momentum_buffer))});
}

LocalOptimizer local_optimizer(const torch_optim::AdagradOptions& defaults) {
  using Options = torch_optim::AdagradOptions;
  using State = torch_optim::AdagradParamState;
  return named_optimizer<optim::Adagrad, State>(
      "Adagrad", defaults,
      {field("lr", &Options::lr), field("lr_decay", &Options::lr_decay),
       field("eps", &Options::eps), field("weight_decay", &Options::weight_decay),
       field("initial_accumulator_value", &Options::initial_accumulator_value),
       hint<Options>("foreach", {}), fixed<Options>("maximize", false),
       fixed<Options>("differentiable", false), hint<Options>("fused", {})},
      {field("step", &State::step), field("sum", &State::sum)});
}

LocalOptimizer local_optimizer(const torch_optim::RMSpropOptions& defaults) {
  using Options = torch_optim::RMSpropOptions;
  using State = torch_optim::RMSpropParamState;
  return named_optimizer<torch_optim::RMSprop, State>(
      "RMSprop", defaults,
      {field("lr", &Options::lr), field("momentum", &Options::momentum),
       field("alpha", &Options::alpha), field("eps", &Options::eps),
       field("centered", &Options::centered), field("weight_decay", &Options::weight_decay),
       hint<Options>("capturable", false), hint<Options>("foreach", {}),
       fixed<Options>("maximize", false), fixed<Options>("differentiable", false)},
      {field("step", &State::step), field("square_avg", &State::square_avg),
       optional(field("momentum_buffer", &State::momentum_buffer)),
       optional(field("grad_avg", &State::grad_avg))});
}

LocalOptimizer local_optimizer(const optim::MuonOptions& defaults) {
  using Options = optim::MuonOptions;
  using State = optim::MuonParamState;
  auto local = named_optimizer<optim::Muon, State>(
      "Muon", defaults,
      {field("lr", &Options::lr), field("weight_decay", &Options::weight_decay),
       field("momentum", &Options::momentum), field("nesterov", &Options::nesterov),
       field("ns_coefficients", &Options::ns_coefficients), field("eps", &Options::eps),
       int_field("ns_steps", &Options::ns_steps), field("adjust_lr_fn", &Options::adjust_lr_fn)},
      {field("momentum_buffer", &State::momentum_buffer)});
  local.cost = [steps = defaults.ns_steps()](const at::Tensor& param) {
    return optim::muon_cost(param, steps);
  };
  local.check_param = optim::check_muon_param;
  return local;
}

LocalOptimizer local_optimizer(const torch_optim::LBFGSOptions&) {
  TORCH_CHECK_VALUE(false,
                    "shardstep: LBFGS cannot be sharded: its step depends on the gradients of all "
                    "parameters at once, and it evaluates the closure several times per step");
}

LocalOptimizer local_optimizer_for(const torch_optim::OptimizerOptions& options) {
  std::optional<LocalOptimizer> local;
  const auto try_type = [&](auto* typed) {
    if (typed != nullptr) local = local_optimizer(*typed);
  };
  try_type(dynamic_cast<const torch_optim::AdamOptions*>(&options));
  try_type(dynamic_cast<const torch_optim::AdamWOptions*>(&options));
  try_type(dynamic_cast<const torch_optim::SGDOptions*>(&options));
  try_type(dynamic_cast<const torch_optim::AdagradOptions*>(&options));
  try_type(dynamic_cast<const torch_optim::RMSpropOptions*>(&options));
  try_type(dynamic_cast<const optim::MuonOptions*>(&options));
  TORCH_CHECK_TYPE(local,
                   "shardstep: expected options of Adam, AdamW, SGD, Adagrad, RMSprop or "
                   "Muon for a param group's own optimizer, got ",
                   c10::demangle(typeid(options).name()));
  return *local;
}

namespace detail {

NamedValues archive_to_values(
    const std::function<void(torch::serialize::OutputArchive&)>& serialize,
    const std::string& type) {
  std::stringstream bytes;
  torch::serialize::InputArchive in;
  try {
    torch::serialize::OutputArchive out;
    serialize(out);
    out.save_to(bytes);
    in.load_from(bytes);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(
        false, "shardstep: cannot save ", type,
        "; implement serialize(OutputArchive&) for it: ", error.what_without_backtrace());
  }
  NamedValues values;
  for (const auto& key : in.keys()) {
    c10::IValue value;
    in.read(key, value);
    values.insert(key, std::move(value));
  }
  return values;
}

void values_to_archive(const NamedValues& values,
                       const std::function<void(torch::serialize::InputArchive&)>& serialize,
                       const std::string& type) {
  try {
    torch::serialize::OutputArchive out;
    for (const auto& item : values) out.write(item.key(), item.value());
    std::stringstream bytes;
    out.save_to(bytes);
    torch::serialize::InputArchive in;
    in.load_from(bytes);
    serialize(in);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "shardstep: cannot load ", type,
                      "; are the values its own, and is serialize(InputArchive&) implemented? ",
                      error.what_without_backtrace());
  }
}

NamedValues matching_keys(const NamedValues& values, const NamedValues& expected,
                          const std::string& type) {
  NamedValues matching;
  for (const auto& item : expected) {
    const auto* value = values.find(item.key());
    TORCH_CHECK_VALUE(value, "shardstep: expected ", type, " to have '", item.key(), "'");
    matching.insert(item.key(), *value);
  }
  for (const auto& item : values) {
    TORCH_CHECK_VALUE(matching.contains(item.key()) || is_foreign(item.key()), "shardstep: ", type,
                      " has no '", item.key(), "', got ", show(item.value()), " for it");
  }
  return matching;
}

}  // namespace detail

}  // namespace shardstep
