locals {
  request_metrics       = coalesce(var.request_metrics, !local.express)
  first_byte_latency_ms = coalesce(var.max_first_byte_latency_ms, local.express ? 50 : 500)
  storage_type          = local.express ? "ExpressOneZoneStorage" : "StandardStorage"

  request_dimensions = {
    BucketName = local.bucket_name
    FilterId   = "EntireBucket"
  }
}

resource "aws_s3_bucket_metric" "this" {
  count = local.request_metrics ? 1 : 0

  bucket = local.bucket
  name   = local.request_dimensions.FilterId
}

resource "aws_cloudwatch_metric_alarm" "errors" {
  count = local.request_metrics ? 1 : 0

  alarm_name        = "${local.bucket_name}-errors"
  alarm_description = "More than ${var.max_error_percent} % of the requests end with a 5xx. S3 throttles with 503 above about 3,500 PUT or 5,500 GET per second and partition, until it has split the bucket; s3kv slows down by itself meanwhile and computes what it does not get. Look for a jump in traffic first."

  namespace           = "AWS/S3"
  metric_name         = "5xxErrors"
  dimensions          = local.request_dimensions
  statistic           = "Average" # 0 or 1 per request: the share
  threshold           = var.max_error_percent / 100
  comparison_operator = "GreaterThanThreshold"
  period              = 300
  evaluation_periods  = 3
  datapoints_to_alarm = 2
  treat_missing_data  = "notBreaching" # nobody asked

  alarm_actions = var.alarm_actions
  ok_actions    = var.alarm_actions
  tags          = local.tags
}

resource "aws_cloudwatch_metric_alarm" "latency" {
  count = local.request_metrics ? 1 : 0

  alarm_name        = "${local.bucket_name}-latency"
  alarm_description = "One request in a hundred waits longer than ${local.first_byte_latency_ms} ms for its first byte. s3kv computes instead of waiting where that is faster, so expect fewer hits rather than slow answers."

  namespace           = "AWS/S3"
  metric_name         = "FirstByteLatency"
  dimensions          = local.request_dimensions
  extended_statistic  = "p99"
  threshold           = local.first_byte_latency_ms
  comparison_operator = "GreaterThanThreshold"
  period              = 300
  evaluation_periods  = 3
  datapoints_to_alarm = 3
  treat_missing_data  = "notBreaching"

  alarm_actions = var.alarm_actions
  ok_actions    = var.alarm_actions
  tags          = local.tags
}

resource "aws_cloudwatch_metric_alarm" "size" {
  count = var.max_bucket_gib == null ? 0 : 1

  alarm_name        = "${local.bucket_name}-size"
  alarm_description = "The bucket holds more than ${var.max_bucket_gib} GiB. A shorter expiration_days is what makes it smaller."

  namespace   = "AWS/S3"
  metric_name = "BucketSizeBytes"
  dimensions = {
    BucketName  = local.bucket_name
    StorageType = local.storage_type
  }
  statistic           = "Average"
  threshold           = var.max_bucket_gib * pow(1024, 3)
  comparison_operator = "GreaterThanThreshold"
  period              = 86400 # written once a day
  evaluation_periods  = 1
  treat_missing_data  = "ignore"

  alarm_actions = var.alarm_actions
  ok_actions    = var.alarm_actions
  tags          = local.tags
}

locals {
  request_widgets = [
    {
      title   = "Requests per minute"
      stat    = "Sum"
      period  = 60
      metrics = ["GetRequests", "PutRequests", "HeadRequests", "ListRequests", "DeleteRequests"]
    },
    {
      title   = "Share of errors (4xx are mostly misses)"
      stat    = "Average"
      period  = 60
      metrics = ["5xxErrors", "4xxErrors"]
    },
    {
      title   = "First byte, p99 (ms)"
      stat    = "p99"
      period  = 60
      metrics = ["FirstByteLatency"]
    },
    {
      title   = "Bytes per minute"
      stat    = "Sum"
      period  = 60
      metrics = ["BytesDownloaded", "BytesUploaded"]
    },
  ]
  storage_widgets = [
    {
      title  = "Size (bytes)"
      stat   = "Average"
      period = 86400
      metric = ["AWS/S3", "BucketSizeBytes", "BucketName", local.bucket_name, "StorageType", local.storage_type]
    },
    {
      title  = "Objects"
      stat   = "Average"
      period = 86400
      metric = ["AWS/S3", "NumberOfObjects", "BucketName", local.bucket_name, "StorageType", "AllStorageTypes"]
    },
  ]

  widgets = concat(
    [for widget in local.request_widgets : {
      title  = widget.title
      stat   = widget.stat
      period = widget.period
      metrics = [
        for metric in widget.metrics :
        ["AWS/S3", metric, "BucketName", local.bucket_name, "FilterId", local.request_dimensions.FilterId]
      ]
    } if local.request_metrics],
    [for widget in local.storage_widgets : {
      title   = widget.title
      stat    = widget.stat
      period  = widget.period
      metrics = [widget.metric]
    }],
  )
}

resource "aws_cloudwatch_dashboard" "this" {
  count = var.dashboard ? 1 : 0

  dashboard_name = local.bucket_name
  dashboard_body = jsonencode({
    widgets = [for i, widget in local.widgets : {
      type   = "metric"
      x      = 12 * (i % 2)
      y      = 6 * floor(i / 2)
      width  = 12
      height = 6
      properties = {
        title   = widget.title
        region  = local.region
        stat    = widget.stat
        period  = widget.period
        metrics = widget.metrics
      }
    }]
  })
}
