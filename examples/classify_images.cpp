// An image classifier on many ranks: a DataLoader that gives every rank its own images,
// DistributedDataParallel to average gradients, ZeroRedundancyOptimizer to divide Adam's state, and
// checkpoints from which a run goes on at any number of ranks.
//
//   torchrun --nproc-per-node=2 --no-python build/examples/classify_images runs 4
//
// trains until epoch 4 and keeps its last two checkpoints in runs/. Start it again with a larger
// number to go on. The images are drawn by the program; replace Shapes by a dataset of yours.

#include <shardstep/shardstep.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

constexpr int64_t kSide = 16;
constexpr int64_t kClasses = 4;

// Noisy pictures of a row, a column, a diagonal or a square. The index decides what is drawn.
class Shapes : public torch::data::datasets::Dataset<Shapes> {
 public:
  Shapes(size_t size, uint64_t seed) : size_(size), seed_(seed) {}

  torch::data::Example<> get(size_t index) override {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed_ + index);
    const auto label = static_cast<int64_t>(index) % kClasses;
    const auto place = torch::randint(2, kSide - 6, {2}, generator, torch::kLong);
    const auto row = place[0].item<int64_t>();
    const auto column = place[1].item<int64_t>();
    auto image = torch::randn({1, kSide, kSide}, generator) * 0.4;
    auto picture = image[0];
    if (label == 0) picture[row] += 1;
    if (label == 1) picture.select(1, column) += 1;
    if (label == 2) picture.diagonal(row - column) += 1;
    if (label == 3) picture.slice(0, row, row + 4).slice(1, column, column + 4) += 1;
    return {image, torch::tensor(label)};
  }
  torch::optional<size_t> size() const override { return size_; }

 private:
  size_t size_;
  uint64_t seed_;
};

// Every rank gets equally many images, in an order that the epoch decides.
auto training_images(int64_t epoch, c10d::ProcessGroup& group) {
  constexpr size_t kImages = 1600;
  torch::data::samplers::DistributedRandomSampler sampler(kImages, group.getSize(),
                                                          group.getRank());
  sampler.set_epoch(epoch);
  return torch::data::make_data_loader(
      Shapes(kImages, /*seed=*/0).map(torch::data::transforms::Stack<>()), sampler,
      torch::data::DataLoaderOptions(32));
}

torch::nn::Sequential make_model() {
  using namespace torch::nn;
  Sequential model;
  int64_t channels = 1;
  for (const int64_t next : {16, 32}) {
    model->push_back(Conv2d(Conv2dOptions(channels, next, 3).padding(1)));
    model->push_back(BatchNorm2d(next));
    model->push_back(ReLU());
    model->push_back(MaxPool2d(2));
    channels = next;
  }
  model->push_back(Flatten());
  model->push_back(Linear(channels * (kSide / 4) * (kSide / 4), kClasses));
  return model;
}

// The share of the test images that the model names correctly. Each rank looks at its part.
double accuracy(torch::nn::Sequential& model, c10d::ProcessGroup& group) {
  torch::NoGradGuard no_grad;
  model->eval();
  auto images = Shapes(400, /*seed=*/1 << 20).map(torch::data::transforms::Stack<>());
  auto counts = torch::zeros({2});
  auto loader = torch::data::make_data_loader(
      std::move(images),
      torch::data::samplers::DistributedSequentialSampler(400, group.getSize(), group.getRank()),
      torch::data::DataLoaderOptions(50));
  for (const auto& batch : *loader) {
    const auto guess = model->forward(batch.data).argmax(1);
    counts[0] += guess.eq(batch.target).sum();
    counts[1] += batch.target.numel();
  }
  std::vector<at::Tensor> tensors{counts};
  group.allreduce(tensors)->wait();
  model->train();
  return (counts[0] / counts[1]).item<double>();
}

int main(int argc, char** argv) {
  const std::string runs = argc > 1 ? argv[1] : "runs";
  const int64_t epochs = argc > 2 ? std::stoll(argv[2]) : 4;
  const auto group = shardstep::init_process_group();
  const int rank = group->getRank();
  at::set_num_threads(1);

  torch::manual_seed(0);
  auto model = make_model();
  shardstep::DistributedDataParallel ddp(model);
  shardstep::ZeroRedundancyOptimizer optimizer(ddp.parameters(), torch::optim::AdamOptions(2e-3));

  int64_t done = 0;
  auto checkpoint = shardstep::CheckpointOptions().module(model.ptr()).keep_last(2);
  if (std::filesystem::exists(runs + "/latest")) {
    done = optimizer.load_checkpoint(runs + "/latest", checkpoint)["epoch"].toInt();
    if (rank == 0) std::cout << "going on after epoch " << done << std::endl;
  }

  for (int64_t epoch = done + 1; epoch <= epochs; ++epoch) {
    auto loader = training_images(epoch, *group);
    double loss_sum = 0;
    int64_t batches = 0;
    for (const auto& batch : *loader) {
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(ddp(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      loss_sum += loss.item<double>();
      ++batches;
    }
    shardstep::NamedValues extra;
    extra.insert("epoch", epoch);
    extra.insert("step", epoch);  // names the directory
    optimizer.save_checkpoint(runs + "/{step:03d}", checkpoint.extra(extra));
    const auto right = accuracy(model, *group);
    if (rank == 0) {
      std::cout << "epoch " << epoch << ": loss " << loss_sum / static_cast<double>(batches) << ", "
                << 100 * right << " % of the test images right" << std::endl;
    }
  }
}
