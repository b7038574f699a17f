// The smallest complete program: a model on every rank, gradients averaged by
// DistributedDataParallel, Adam's state divided by ZeroRedundancyOptimizer.
//
//   torchrun --nproc-per-node=2 --no-python build/examples/train_ddp

#include <shardstep/shardstep.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto group = shardstep::init_process_group();
  const int rank = group->getRank();

  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(),
                              torch::nn::Linear(64, 1));
  shardstep::DistributedDataParallel ddp(model);
  shardstep::ZeroRedundancyOptimizer optimizer(ddp.parameters(), torch::optim::AdamOptions(1e-2));

  // Each rank draws examples of its own, and some ranks draw more of them than others.
  torch::manual_seed(1 + rank);
  const int batches = 100 + 10 * rank;
  shardstep::Join join({ddp, optimizer});
  for (int batch = 0; batch < batches; ++batch) {
    const auto input = torch::randn({32, 8});
    const auto target = input.sin().sum(1, /*keepdim=*/true);
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(ddp(input), target);
    loss.backward();
    optimizer.step();
    if (rank == 0 && batch % 20 == 19) {
      std::cout << "batch " << batch + 1 << ": loss " << loss.item<float>() << std::endl;
    }
  }
  join.finish();

  const auto dict = optimizer.consolidate_state_dict();  // to rank 0
  if (rank == 0) {
    torch::save(model, "model.pt");
    shardstep::write_state_dict(*dict, "optimizer.pt");
  }
}
