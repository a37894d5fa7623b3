// Collectives between devices of the rig: only for them, through a group of gloo underneath.
//
// A collective reads its input when it is called and writes its output when it is waited for, so
// that whoever reads without waiting reads old values, and whoever changes an input before the end
// is told so.
#include "rig.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

namespace rig {

using c10d::Backend;
using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

static void check(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == KIND, "rigccl: tensors must be on the device, this one is on ",
      tensor.device());
  TORCH_CHECK(
      tensor.device().index() == current_device(), "rigccl: the tensor is on ", tensor.device(),
      ", this process's device is rig:", int(current_device()));
  TORCH_CHECK_VALUE(
      tensor.is_contiguous(tensor.suggest_memory_format()), "rigccl: Tensors must be contiguous");
  TORCH_CHECK(!tensor.is_sparse(), "rigccl: tensors must be dense");
  switch (tensor.scalar_type()) {
    case at::kChar: case at::kByte: case at::kInt: case at::kLong: case at::kHalf: case at::kFloat:
    case at::kDouble: case at::kBFloat16: case at::kBool: case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return;
    default:
      TORCH_CHECK_TYPE(false, "rigccl: Unconvertible type ", tensor.scalar_type());
  }
}

// gloo moves neither truth values nor floats of eight bits: as bytes it does.
static at::Tensor movable(const at::Tensor& host) {
  return host.element_size() == 1 && host.scalar_type() != at::kChar ? host.view(at::kByte) : host;
}

static bool same_bytes(const at::Tensor& left, const at::Tensor& right) {
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

// Tensors of the device, and what stands for them on the host while a collective runs.
class Staged {
 public:
  at::Tensor read(const at::Tensor& tensor) {
    check(tensor);
    auto host = on_host(tensor).clone();
    read_.emplace_back(tensor, host.clone());
    return movable(host);
  }
  at::Tensor write(const at::Tensor& tensor) {
    check(tensor);
    auto host = at::empty_like(on_host(tensor));
    written_.emplace_back(tensor, host);
    return movable(host);
  }
  at::Tensor change(const at::Tensor& tensor) {
    auto host = read(tensor);
    written_.emplace_back(tensor, host.view(tensor.scalar_type()));
    return host;
  }
  Tensors read(const Tensors& all) {
    Tensors made;
    for (const auto& each : all) made.push_back(read(each));
    return made;
  }
  Tensors write(const Tensors& all) {
    Tensors made;
    for (const auto& each : all) made.push_back(write(each));
    return made;
  }
  Tensors change(const Tensors& all) {
    Tensors made;
    for (const auto& each : all) made.push_back(change(each));
    return made;
  }
  void finish(const std::function<void(at::Tensor&)>& last) {
    for (const auto& [tensor, before] : read_) {
      TORCH_CHECK(
          same_bytes(on_host(tensor), before),
          "rigccl: a tensor of shape ", tensor.sizes(), " changed while a collective read it; wait"
          " for the collective first");
    }
    for (auto& [tensor, host] : written_) {
      if (last) last(host);
      on_host(tensor).copy_(host);
    }
    read_.clear();
    written_.clear();
  }
  Tensors outputs() const {
    Tensors made;
    for (const auto& [tensor, host] : written_) made.push_back(tensor);
    return made;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> read_, written_;
};

class StagedWork final : public Work {
 public:
  StagedWork(WorkPtr inner, Staged staged, std::function<void(at::Tensor&)> last, OpType kind)
      : Work(-1, kind), inner_(std::move(inner)), staged_(std::move(staged)),
        outputs_(staged_.outputs()), last_(std::move(last)) {}

  bool isCompleted() override {
    if (!inner_->isCompleted()) return false;
    wait();
    return true;
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  void synchronize() override {
    wait();
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (!finished_) {
      inner_->wait(timeout);
      staged_.finish(last_);
      finished_ = true;
    }
    return true;
  }
  void abort() override {
    inner_->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  WorkPtr inner_;
  Staged staged_;
  Tensors outputs_;
  std::function<void(at::Tensor&)> last_;
  bool finished_ = false;
};

class Group final : public Backend {
 public:
  explicit Group(c10::intrusive_ptr<Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "rigccl";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return inner_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    inner_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    inner_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return inner_->getSequenceNumberForGroup();
  }
  void abort() override {
    inner_->abort();
  }
  void shutdown() override {
    inner_->shutdown();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Staged staged;
    auto hosts = options.rootRank == getRank() ? staged.read(tensors) : staged.write(tensors);
    return work(inner_->broadcast(hosts, options), std::move(staged), OpType::BROADCAST);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Staged staged;
    auto hosts = staged.change(tensors);
    auto own = options;
    auto last = plain_sum(own.reduceOp, hosts);
    return work(inner_->allreduce(hosts, own), std::move(staged), OpType::ALLREDUCE, last);
  }
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (size_t place = 0; place + 1 < tensors.size(); place++) {
      Tensors one{tensors[place]};
      allreduce(one, options)->wait();
    }
    Tensors one{tensors.back()};
    return allreduce(one, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Staged staged;
    auto hosts = options.rootRank == getRank() ? staged.change(tensors) : staged.read(tensors);
    auto own = options;
    auto last = plain_sum(own.reduceOp, hosts);
    return work(inner_->reduce(hosts, own), std::move(staged), OpType::REDUCE, last);
  }
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    Staged staged;
    std::vector<Tensors> hosts;
    for (auto& each : outputs) hosts.push_back(staged.write(each));
    auto own = staged.read(inputs);
    return work(inner_->allgather(hosts, own, options), std::move(staged), OpType::ALLGATHER);
  }
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(
        output.numel() == input.numel() * getSize(),
        "rigccl: output tensor size must be equal to world_size times input tensor size");
    Staged staged;
    auto own = staged.read(input).flatten();
    auto host = staged.write(output).flatten();
    return work(inner_->_allgather_base(host, own, options), std::move(staged),
                OpType::_ALLGATHER_BASE);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    WorkPtr last;
    for (size_t place = 0; place < outputs.size(); place++) {
      if (last) last->wait();
      last = _allgather_base(outputs[place], inputs[place], options);
    }
    return last;
  }
  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Staged staged;
    std::vector<Tensors> hosts;
    for (auto& each : outputs) hosts.push_back(staged.write(each));
    auto own = staged.read(inputs);
    return work(inner_->gather(hosts, own, options), std::move(staged), OpType::GATHER);
  }
  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    Staged staged;
    std::vector<Tensors> hosts;
    for (auto& each : inputs) hosts.push_back(staged.read(each));
    auto own = staged.write(outputs);
    return work(inner_->scatter(own, hosts, options), std::move(staged), OpType::SCATTER);
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    auto joined = at::cat(inputs.at(0));
    return _reduce_scatter_base(outputs.at(0), joined, options);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK_VALUE(
        input.numel() == output.numel() * getSize(),
        "rigccl: input tensor must be the same size as output size times world size");
    Staged staged;
    Tensors own{staged.read(input).flatten()};
    auto host = staged.write(output).flatten();
    auto plain = options;
    auto last = plain_sum(plain.reduceOp, own);
    return work(inner_->_reduce_scatter_base(host, own[0], plain), std::move(staged),
                OpType::_REDUCE_SCATTER_BASE, last);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t place = 0; place < outputs.size(); place++) {
      if (last) last->wait();
      last = _reduce_scatter_base(outputs[place], inputs[place], options);
    }
    return last;
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    Staged staged;
    auto own = staged.read(input);
    auto host = staged.write(output);
    return work(inner_->alltoall_base(host, own, output_sizes, input_sizes, options),
                std::move(staged), OpType::ALLTOALL_BASE);
  }
  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    Staged staged;
    auto own = staged.read(inputs);
    auto hosts = staged.write(outputs);
    return work(inner_->alltoall(hosts, own, options), std::move(staged), OpType::ALLTOALL);
  }
  // Messages meet in their order alone: nccl knows no tags.
  WorkPtr send(Tensors& tensors, int to, int) override {
    TORCH_CHECK(to != getRank(), "rigccl: a rank cannot send to itself");
    Staged staged;
    auto hosts = staged.read(tensors);
    return work(inner_->send(hosts, to, 0), std::move(staged), OpType::SEND);
  }
  WorkPtr recv(Tensors& tensors, int from, int) override {
    TORCH_CHECK(from != getRank(), "rigccl: a rank cannot receive from itself");
    Staged staged;
    auto hosts = staged.write(tensors);
    return work(inner_->recv(hosts, from, 0), std::move(staged), OpType::RECV);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions plain;
    plain.timeout = options.timeout;
    return inner_->barrier(plain);
  }

 private:
  static WorkPtr work(
      WorkPtr inner, Staged staged, OpType kind, std::function<void(at::Tensor&)> last = {}) {
    return c10::make_intrusive<StagedWork>(
        std::move(inner), std::move(staged), std::move(last), kind);
  }

  // What gloo does not know: a mean, and a sum of multiplied values.
  std::function<void(at::Tensor&)> plain_sum(ReduceOp& op, Tensors& hosts) const {
    if (op == ReduceOp::AVG) {
      op = ReduceOp::SUM;
      return [size = getSize()](at::Tensor& host) {
        at::isIntegralType(host.scalar_type(), true) ? host.floor_divide_(size) : host.div_(size);
      };
    }
    if (op == ReduceOp::PREMUL_SUM) {
      const auto* given = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
      for (auto& host : hosts) {
        given->tensor_factor.defined() ? host.mul_(given->tensor_factor.cpu())
                                       : host.mul_(given->double_factor);
      }
      op = ReduceOp::SUM;
    }
    return {};
  }

  c10::intrusive_ptr<Backend> inner_;
};

} // namespace rig

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pybind11::module::import("torch.distributed");
  pybind11::class_<rig::Group, c10::intrusive_ptr<rig::Group>, c10d::Backend>(module, "Group")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Backend>>());
  module.def("default_generator", &rig::default_generator);
}
