// What the three sources of the rig share: a device of torch's PrivateUse1 on the host's memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

namespace rig {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

// Devices of one process; each thread has a current one, at first device 0, as on CUDA.
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

// Memory of the host that belongs to `device` from now on, and is counted as its own.
c10::Storage as_device_storage(c10::Storage host, c10::DeviceIndex device);
c10::DataPtr as_device_memory(c10::Storage host, c10::DeviceIndex device);

// The same memory as a tensor of the CPU; it keeps the device's tensor alive.
at::Tensor on_host(const at::Tensor& tensor);

// What the next random operator of `device` draws from: its seed and offset decide, as Philox's do.
uint64_t next_draw(c10::DeviceIndex device);
uint64_t next_draw(const at::Generator& generator);
const at::Generator& default_generator(c10::DeviceIndex device);

} // namespace rig
