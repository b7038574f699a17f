// The program that launcher tests start: joins the group, sums over it and a sub-group in reverse
// order, and prints one line per rank. With "fail-first", the first attempt exits with an error.

#include <shardstep/process_group.h>

#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>
#include <string>

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    auto options = shardstep::ProcessGroupOptions().timeout(std::chrono::seconds(60));
    auto group = shardstep::init_process_group(options);
    const int rank = group->getRank();
    const int size = group->getSize();
    std::vector<at::Tensor> sum{at::full({1}, rank + 1.0)};
    group->allreduce(sum)->wait();
    const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
    if (mode == "fail-first" && std::string(attempt != nullptr ? attempt : "") == "0") {
      // Both ranks fail by themselves, so that neither prints that the other went.
      return 3;
    }
    std::vector<int> reversed;
    for (int r = size - 1; r >= 0; --r) reversed.push_back(r);
    auto sub_group = shardstep::new_group(reversed, options);
    std::vector<at::Tensor> sub_sum{at::full({1}, rank + 1.0)};
    sub_group->allreduce(sub_sum)->wait();
    auto line = "rank " + std::to_string(rank) + " of " + std::to_string(size) + ": sum " +
                std::to_string(sum[0].item<int>()) + ", reversed rank " +
                std::to_string(sub_group->getRank()) + ", sum " +
                std::to_string(sub_sum[0].item<int>()) + "\n";
    std::fputs(line.c_str(), stdout);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
