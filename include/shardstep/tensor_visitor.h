#pragma once

// Finds the tensors in a value of any type, for modules whose forward returns more than a tensor.
// Supported: tensors, std::optional, pair, tuple, array, vector and other sequences, maps (their
// values), variant, unique_ptr and shared_ptr, nested to any depth. To support a type of your own,
// define a function in its namespace:
//
//   template <class Visit>
//   void visit_tensors(Output& output, Visit&& visit) { visit(output.logits); visit(output.states);
//   }

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

namespace shardstep::detail {

template <class T>
inline constexpr bool is_variant = false;
template <class... Ts>
inline constexpr bool is_variant<std::variant<Ts...>> = true;
template <class T>
inline constexpr bool is_handle = false;
template <class T>
inline constexpr bool is_handle<std::optional<T>> = true;
template <class T, class D>
inline constexpr bool is_handle<std::unique_ptr<T, D>> = true;
template <class T>
inline constexpr bool is_handle<std::shared_ptr<T>> = true;

template <class T>
concept TupleLike = requires { std::tuple_size<T>::value; };
template <class T>
concept RangeLike = requires(T& range) {
  range.begin();
  range.end();
};
template <class T>
concept MapLike = RangeLike<T> && requires { typename T::mapped_type; };

// Stands for any visitor in the check whether a type has visit_tensors.
struct AnyVisit {
  template <class T>
  void operator()(T&) const {}
};
template <class T>
concept Visitable = requires(T& value, AnyVisit visit) { visit_tensors(value, visit); };

// Calls visit(at::Tensor&) for every tensor in `value`. Returns false if it contains a type that is
// not supported.
template <class T, class Visit>
bool for_each_tensor(T& value, Visit&& visit) {
  using Value = std::remove_const_t<T>;
  bool complete = true;
  const auto inner = [&](auto& part) { complete = for_each_tensor(part, visit) && complete; };
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    if constexpr (!std::is_const_v<T>) visit(value);
    return !std::is_const_v<T>;
  } else if constexpr (std::is_arithmetic_v<Value> || std::is_enum_v<Value> ||
                       std::is_same_v<Value, std::string> ||
                       std::is_same_v<Value, std::monostate> ||
                       std::is_same_v<Value, std::nullopt_t>) {
    return true;
  } else if constexpr (Visitable<T>) {
    visit_tensors(value, inner);
  } else if constexpr (is_variant<Value>) {
    std::visit(inner, value);
  } else if constexpr (is_handle<Value>) {
    if (value) inner(*value);
  } else if constexpr (TupleLike<Value>) {
    std::apply([&](auto&... parts) { (inner(parts), ...); }, value);
  } else if constexpr (MapLike<Value>) {
    for (auto& item : value) inner(item.second);
  } else if constexpr (RangeLike<Value>) {
    if constexpr (!std::is_same_v<Value, std::vector<bool>>) {
      for (auto& item : value) inner(item);
    }
  } else {
    return false;
  }
  return complete;
}

}  // namespace shardstep::detail
