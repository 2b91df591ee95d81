// FFmpeg's libraries encode and write the video: swscale converts the colours, libx264 encodes, the mov muxer writes a
// file in memory (memfd), because it rewrites the file at its end to move the index to the front.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/opt.h>
#include <libswscale/swscale.h>
}

#include "shared/core/fd_io.h"
#include "shared/core/unique_fd.h"
#include "shared/media/mp4.h"

namespace ditfleet::media {
namespace {

constexpr int kLargestSide = 16384;
constexpr int kThreads = 4;  // fixed, because the encoder's output depends on it
constexpr double kLowestRate = 0.1, kHighestRate = 1000, kDefaultRate = 16;  // frames per second

struct Close {
  void operator()(AVCodecContext* codec) const { avcodec_free_context(&codec); }
  void operator()(AVFrame* frame) const { av_frame_free(&frame); }
  void operator()(AVPacket* packet) const { av_packet_free(&packet); }
  void operator()(SwsContext* scaler) const { sws_freeContext(scaler); }
  void operator()(AVFormatContext* file) const {
    if (file->pb != nullptr) avio_closep(&file->pb);
    avformat_free_context(file);
  }
};
template <class T>
using Owned = std::unique_ptr<T, Close>;

// `status`: what a function of FFmpeg returned; negative for an error.
Result<void> checked(int status, const char* what) {
  if (status >= 0) return {};
  std::array<char, AV_ERROR_MAX_STRING_SIZE> why = {};
  av_strerror(status, why.data(), why.size());
  return Error{status == AVERROR(ENOMEM) ? Code::kOutOfMemory : Code::kInternal,
               "[media] cannot " + std::string(what) + " MP4: " + why.data(),
               {}};
}

Result<const AVCodec*> find_encoder() {
  for (const char* name : {"libx264", "libopenh264"}) {
    if (const AVCodec* found = avcodec_find_encoder_by_name(name)) return found;
  }
  return unavailable(
      "[media] cannot write MP4: libavcodec has neither libx264 nor libopenh264; install a libavcodec with one of "
      "them, "
      "or use output_format webp");
}

}  // namespace

struct Mp4Writer::Impl {
  Result<void> open(int width, int height, double frame_rate, int quality);
  Result<void> open_encoder(int width, int height, AVRational rate, int quality);
  Result<void> open_scaler();
  Result<void> open_file();
  Result<void> encode(const AVFrame* next);  // null: the end

  UniqueFd memory;
  Owned<AVCodecContext> codec;
  Owned<SwsContext> scaler;
  Owned<AVFormatContext> file;
  Owned<AVFrame> frame{av_frame_alloc()};
  Owned<AVPacket> packet{av_packet_alloc()};
  AVStream* stream = nullptr;  // owned by `file`
  std::int64_t frames = 0;
};

Result<void> Mp4Writer::Impl::open(int width, int height, double frame_rate, int quality) {
  if (width < 2 || height < 2 || width > kLargestSide || height > kLargestSide || width % 2 != 0 || height % 2 != 0) {
    return invalid_argument("[media] the video is " + std::to_string(width) + "x" + std::to_string(height) +
                            "; for MP4 both sides must be even and from 2 to " + std::to_string(kLargestSide));
  }
  if (frame_rate != 0 && !(frame_rate >= kLowestRate && frame_rate <= kHighestRate)) {
    return invalid_argument("[media] the video has " + std::to_string(frame_rate) +
                            " frames per second; it must have 0.1 to 1000");
  }
  const AVRational rate = av_d2q(frame_rate == 0 ? kDefaultRate : frame_rate, 1'001'000);
  if (!frame || !packet) return checked(AVERROR(ENOMEM), "write");
  av_log_set_level(AV_LOG_QUIET);
  if (auto done = open_encoder(width, height, rate, quality); !done) return done;
  if (auto done = open_scaler(); !done) return done;
  return open_file();
}

Result<void> Mp4Writer::Impl::open_encoder(int width, int height, AVRational rate, int quality) {
  const auto encoder = find_encoder();
  if (!encoder) return encoder.error();
  codec.reset(avcodec_alloc_context3(*encoder));
  if (!codec) return checked(AVERROR(ENOMEM), "write");
  codec->width = width;
  codec->height = height;
  codec->pix_fmt = AV_PIX_FMT_YUV420P;
  codec->time_base = av_inv_q(rate);
  codec->framerate = rate;
  codec->gop_size = std::max(1, static_cast<int>(std::lround(2 * av_q2d(rate))));  // seeking is exact to two seconds
  codec->thread_count = kThreads;
  codec->color_range = AVCOL_RANGE_MPEG;
  codec->color_primaries = AVCOL_PRI_BT709;
  codec->color_trc = AVCOL_TRC_BT709;
  codec->colorspace = AVCOL_SPC_BT709;
  codec->chroma_sample_location = AVCHROMA_LOC_LEFT;
  codec->flags = AV_CODEC_FLAG_GLOBAL_HEADER | AV_CODEC_FLAG_BITEXACT;
  const int quantizer = 51 - quality * 36 / 100;  // 100: 15, visually lossless
  if (std::strcmp((*encoder)->name, "libx264") == 0) {
    av_opt_set(codec->priv_data, "preset", "veryfast", 0);
    av_opt_set_double(codec->priv_data, "crf", quantizer, 0);
    // Otherwise the output depends on the CPU, and with AVX-512 (x264 164) it differs between runs.
    av_opt_set(codec->priv_data, "x264-params", "cpu-independent=1", 0);
  } else {
    codec->qmin = codec->qmax = quantizer;
  }
  return checked(avcodec_open2(codec.get(), *encoder, nullptr), "start the encoder of");
}

// RGB in full range → YUV in limited range by bt709's matrix; chroma is sampled at the left, as the tags say.
Result<void> Mp4Writer::Impl::open_scaler() {
  scaler.reset(sws_alloc_context());
  if (!scaler) return checked(AVERROR(ENOMEM), "write");
  const std::pair<const char*, int> options[] = {
      {"srcw", codec->width},
      {"srch", codec->height},
      {"src_format", AV_PIX_FMT_RGB24},
      {"src_range", 1},
      {"dstw", codec->width},
      {"dsth", codec->height},
      {"dst_format", codec->pix_fmt},
      {"dst_range", 0},
      {"dst_h_chr_pos", 0},
      {"dst_v_chr_pos", 128},
      {"sws_flags", SWS_BILINEAR | SWS_FULL_CHR_H_INP | SWS_ACCURATE_RND | SWS_BITEXACT}};
  for (const auto& [name, value] : options) av_opt_set_int(scaler.get(), name, value, 0);
  const int* bt709 = sws_getCoefficients(SWS_CS_ITU709);
  if (auto done = checked(sws_setColorspaceDetails(scaler.get(), bt709, 1, bt709, 0, 0, 1 << 16, 1 << 16),
                          "convert the colours of");
      !done)
    return done;
  if (auto done = checked(sws_init_context(scaler.get(), nullptr, nullptr), "convert the colours of"); !done)
    return done;
  frame->format = codec->pix_fmt;
  frame->width = codec->width;
  frame->height = codec->height;
  return checked(av_frame_get_buffer(frame.get(), 0), "write");
}

Result<void> Mp4Writer::Impl::open_file() {
  memory.reset(::memfd_create("ditfleet-mp4", MFD_CLOEXEC));
  if (!memory.valid()) return checked(AVERROR(errno), "keep in memory the");
  const std::string path = "file:/proc/self/fd/" + std::to_string(memory.get());
  AVFormatContext* made = nullptr;
  if (auto done = checked(avformat_alloc_output_context2(&made, nullptr, "mp4", path.c_str()), "write"); !done)
    return done;
  file.reset(made);
  file->flags |= AVFMT_FLAG_BITEXACT;
  stream = avformat_new_stream(made, nullptr);
  if (stream == nullptr) return checked(AVERROR(ENOMEM), "write");
  stream->time_base = codec->time_base;
  stream->avg_frame_rate = codec->framerate;
  if (auto done = checked(avcodec_parameters_from_context(stream->codecpar, codec.get()), "write"); !done) return done;
  if (auto done = checked(avio_open(&made->pb, path.c_str(), AVIO_FLAG_WRITE), "open the memory of the"); !done)
    return done;
  AVDictionary* options = nullptr;
  av_dict_set(&options, "movflags", "+faststart+write_colr", 0);
  const int status = avformat_write_header(made, &options);
  av_dict_free(&options);
  return checked(status, "write the header of");
}

Result<void> Mp4Writer::Impl::encode(const AVFrame* next) {
  if (auto sent = checked(avcodec_send_frame(codec.get(), next), "encode a frame of"); !sent) return sent;
  for (;;) {
    const int status = avcodec_receive_packet(codec.get(), packet.get());
    if (status == AVERROR(EAGAIN) || status == AVERROR_EOF) return {};
    if (auto received = checked(status, "encode a frame of"); !received) return received;
    packet->duration = 1;
    av_packet_rescale_ts(packet.get(), codec->time_base, stream->time_base);
    if (auto written = checked(av_interleaved_write_frame(file.get(), packet.get()), "write a frame of"); !written)
      return written;
  }
}

Result<Mp4Writer> Mp4Writer::open(int width, int height, double frame_rate, int quality) {
  auto impl = std::make_unique<Impl>();
  if (auto opened = impl->open(width, height, frame_rate, quality); !opened) return opened.error();
  return Mp4Writer(std::move(impl));
}

Mp4Writer::Mp4Writer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Mp4Writer::Mp4Writer(Mp4Writer&&) noexcept = default;
Mp4Writer& Mp4Writer::operator=(Mp4Writer&&) noexcept = default;
Mp4Writer::~Mp4Writer() = default;

Result<void> Mp4Writer::add(std::span<const std::uint8_t> rgb) {
  const auto stride = static_cast<std::size_t>(impl_->codec->width) * 3;
  if (rgb.size() != stride * static_cast<std::size_t>(impl_->codec->height)) {
    return invalid_argument("[media] a frame has " + std::to_string(rgb.size()) + " bytes; it needs " +
                            std::to_string(stride * static_cast<std::size_t>(impl_->codec->height)));
  }
  AVFrame& frame = *impl_->frame;
  if (auto own = checked(av_frame_make_writable(&frame), "write"); !own) return own;
  const std::uint8_t* rows = rgb.data();
  const int row_bytes = static_cast<int>(stride);
  if (auto done =
          checked(sws_scale(impl_->scaler.get(), &rows, &row_bytes, 0, frame.height, frame.data, frame.linesize),
                  "convert the colours of");
      !done)
    return done;
  frame.pts = impl_->frames++;
  return impl_->encode(&frame);
}

Result<std::string> Mp4Writer::finish(const std::string& comment) {
  if (impl_->frames == 0) return invalid_argument("[media] the video has no frames; it must have at least 1");
  if (auto drained = impl_->encode(nullptr); !drained) return drained.error();
  if (!comment.empty()) av_dict_set(&impl_->file->metadata, "comment", comment.c_str(), 0);
  if (auto ended = checked(av_write_trailer(impl_->file.get()), "write the index of"); !ended) return ended.error();
  if (auto closed = checked(avio_closep(&impl_->file->pb), "write"); !closed) return closed.error();
  const auto size = ::lseek(impl_->memory.get(), 0, SEEK_END);
  ::lseek(impl_->memory.get(), 0, SEEK_SET);
  auto bytes = read_up_to(impl_->memory.get(), static_cast<std::size_t>(std::max<off_t>(0, size)));
  if (!bytes) return checked(AVERROR(errno), "read back the").error();
  return std::move(*bytes);
}

}  // namespace ditfleet::media
