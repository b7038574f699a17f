#include "shard/state_matching.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/zero_support.h"

namespace shardstep {
namespace {

using detail::check_state_shape;
using detail::match_params;

TEST(StateMatching, GivesOurNameOfEachSavedParameter) {
  EXPECT_EQ(match_params({{7, 3}, {5}}, {{0, 1}, {2}}, ""),
            (std::map<int64_t, int64_t>{{7, 0}, {3, 1}, {5, 2}}));
  // A parameter that a group lists twice.
  EXPECT_EQ(match_params({{2, 1, 2}}, {{0, 1, 0}}, ""),
            (std::map<int64_t, int64_t>{{2, 0}, {1, 1}}));
}

TEST(StateMatching, RefusesOtherGroupsAndSaysWhere) {
  const std::string where = " (rank 1 of 2)";
  for (const auto& saved :
       {detail::GroupParams{{0, 1}}, {{0}, {1}}, {{0, 1, 2}, {3}}, {{}, {}}, {{0, 0}, {1}}}) {
    const auto message =
        test::error_of<c10::ValueError>([&] { match_params(saved, {{0, 1}, {2}}, where); });
    EXPECT_NE(message.find("expected"), std::string::npos) << message;
    EXPECT_NE(message.find(where), std::string::npos) << message;
  }
}

TEST(StateMatching, StateOfKnownOptimizersHasTheParametersShapeOrNone) {
  const auto param = at::ones({3, 2});
  for (const auto& shape : {std::vector<int64_t>{3, 2}, {}}) {
    check_state_shape("exp_avg", shape, 0, param, true, "");
  }
  for (const auto& shape : {std::vector<int64_t>{2, 3}, {6}, {1}}) {
    check_state_shape("exp_avg", shape, 0, param, false, "");
    const auto message = test::error_of<c10::ValueError>(
        [&] { check_state_shape("exp_avg", shape, 4, param, true, " (rank 0 of 1)"); });
    EXPECT_NE(message.find("exp_avg of parameter 4 with shape [3, 2]"), std::string::npos)
        << message;
  }
}

}  // namespace
}  // namespace shardstep
