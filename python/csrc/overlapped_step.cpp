// OverlappedStep for Python's DistributedDataParallel, whose hooks return Python futures.

#include "ddp/overlapped_step.h"

#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>

#include "bindings.h"

namespace shardstep::python {
namespace {

// The future is a Python object, so it is used and released with the GIL held.
BucketReduction reduction_of(const py::object& future) {
  const std::shared_ptr<py::object> shared(new py::object(future), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return {[shared] {
            const py::gil_scoped_acquire gil;
            return shared->attr("done")().cast<bool>();
          },
          [shared] {
            const py::gil_scoped_acquire gil;
            const py::object result = shared->attr("wait")();
            return py::isinstance<py::list>(result) ? result.cast<py::list>()[0].cast<at::Tensor>()
                                                    : result.cast<at::Tensor>();
          }};
}

}  // namespace

void bind_overlapped_step(py::module_& module) {
  using Update = std::function<void(const OverlappedUpdate::Gradients&, int)>;
  py::class_<OverlappedStep, std::shared_ptr<OverlappedStep>>(module, "OverlappedStep")
      .def(py::init([](Update update, std::function<void()> end, std::function<void()> wait,
                       bool interleaved, bool static_graph, bool find_unused_parameters,
                       bool any_order) {
             return std::make_shared<OverlappedStep>(
                 OverlappedStepOptions{
                     .update = interleaved ? UpdateWhen::kEachBucket : UpdateWhen::kLastBucket,
                     .arrive = ArriveWhen::kBackwardEnds,
                     .static_graph = static_graph,
                     .find_unused_parameters = find_unused_parameters,
                     .any_order = any_order},
                 OverlappedUpdate{std::move(update), std::move(end), std::move(wait)});
           }),
           py::arg("update"), py::arg("end"), py::arg("wait"), py::kw_only(),
           py::arg("interleaved"), py::arg("static_graph"), py::arg("find_unused_parameters"),
           py::arg("any_order"))
      .def("reducing",
           torch::wrap_pybind_function(
               [](OverlappedStep& step, c10d::GradBucket& bucket, const py::object& future) {
                 auto reduction = reduction_of(future);
                 const py::gil_scoped_release no_gil;
                 step.reducing(bucket, std::move(reduction));
               }))
      .def("arrive",
           torch::wrap_pybind_function_no_gil([](OverlappedStep& step) { step.arrive(); }));
}

}  // namespace shardstep::python
