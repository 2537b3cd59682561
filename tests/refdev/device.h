// What kernels and collectives need of the device as torch sees it.
#pragma once

#include <ATen/ATen.h>

#include "runtime.h"

namespace refdev {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

void register_device(); // once a process
c10::Allocator* device_allocator();
void resize_storage(const c10::Storage& storage, size_t bytes);
Queue& queue_of(const c10::Stream& stream);

// A number from the device's generator, to seed the kernel that is launched.
uint64_t draw_seed(const std::optional<at::Generator>& generator);

// A tensor of the CPU over the same bytes, for the device's own threads. It keeps the storage alive.
at::Tensor host_view(const at::Tensor& tensor);

} // namespace refdev
