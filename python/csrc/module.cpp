#include <shardstep/version.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("version") = shardstep::version();
  m.attr("torch_version") = TORCH_VERSION;
}
