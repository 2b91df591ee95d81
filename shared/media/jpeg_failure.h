// How code that calls libjpeg learns of its errors. Only for decode_jpeg.cpp and encode_jpeg.cpp.
#pragma once

#include <csetjmp>
#include <cstdio>

// jpeglib.h uses FILE without including it.
#include <jpeglib.h>

namespace ditfleet::media {

// libjpeg leaves by longjmp, so a function that calls setjmp(leave) and then libjpeg may have nothing with a
// destructor.
struct JpegFailure {
  jpeg_error_mgr manager = {};  // first: libjpeg gives back a pointer to it
  std::jmp_buf leave;
  char message[JMSG_LENGTH_MAX] = {};

  // To be the `err` of a compressor or decompressor.
  jpeg_error_mgr* install() {
    jpeg_std_error(&manager);
    manager.error_exit = fail;
    return &manager;
  }
  [[noreturn]] static void fail(j_common_ptr info) {
    auto* failure = reinterpret_cast<JpegFailure*>(info->err);
    info->err->format_message(info, failure->message);
    std::longjmp(failure->leave, 1);
  }
};

}  // namespace ditfleet::media
