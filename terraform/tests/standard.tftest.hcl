# The real provider with keys that open nothing: it renders every policy while planning, offline.
provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = data.aws_caller_identity.current
  values = { account_id = "111122223333" }
}

# ARNs that a plan does not know yet, so that what refers to them can be compared.
override_resource {
  target          = aws_iam_policy.access["reader"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/reader" }
}

override_resource {
  target          = aws_iam_policy.access["writer"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/writer" }
}

run "standard" {
  command = plan

  variables {
    name           = "cache"
    prefix         = "team/s3kv"
    tags           = { Team = "inference" }
    alarm_actions  = ["arn:aws:sns:eu-west-1:111122223333:pager"]
    max_bucket_gib = 100
  }

  # --- the bucket

  assert {
    condition     = length(aws_s3_bucket.this) == 1 && length(aws_s3_directory_bucket.this) == 0
    error_message = "there must be a general purpose bucket and no other"
  }

  assert {
    condition     = aws_s3_bucket.this[0].bucket == "cache" && aws_s3_bucket.this[0].force_destroy == true
    error_message = "the bucket must have its name, and be destroyed with what is in it"
  }

  assert {
    condition = aws_s3_bucket.this[0].tags == tomap({
      Application = "s3kv"
      ManagedBy   = "terraform"
      DataClass   = "recomputable-cache"
      Team        = "inference"
    })
    error_message = "the bucket must carry the module's tags and the caller's"
  }

  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.this[0].block_public_acls,
      aws_s3_bucket_public_access_block.this[0].block_public_policy,
      aws_s3_bucket_public_access_block.this[0].ignore_public_acls,
      aws_s3_bucket_public_access_block.this[0].restrict_public_buckets,
    ])
    error_message = "all four kinds of public access must be blocked"
  }

  assert {
    condition     = aws_s3_bucket_ownership_controls.this[0].rule[0].object_ownership == "BucketOwnerEnforced"
    error_message = "there must be no ACLs"
  }

  assert {
    condition = [for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : {
      algorithm  = rule.apply_server_side_encryption_by_default[0].sse_algorithm
      bucket_key = rule.bucket_key_enabled
    }] == [{ algorithm = "AES256", bucket_key = false }]
    error_message = "encryption must be SSE-S3"
  }

  assert {
    # What is set, and nothing else: also not what a later provider may be able to set.
    condition = jsonencode([for rule in aws_s3_bucket_lifecycle_configuration.this.rule : {
      for name, value in rule :
      name => try([for part in value : { for k, v in part : k => v if try(length(v) > 0, v != null) }], value)
      if try(length(value) > 0, value != null)
      }]) == jsonencode([
      {
        id         = "expire"
        status     = "Enabled"
        filter     = [{ prefix = "team/s3kv/" }]
        expiration = [{ days = 7, expired_object_delete_marker = false }]
      },
      {
        id                                = "abort-multipart"
        status                            = "Enabled"
        filter                            = [{}]
        abort_incomplete_multipart_upload = [{ days_after_initiation = 1 }]
      },
    ])
    error_message = "what is under the prefix must expire after 7 days, unfinished uploads anywhere after 1, and nothing else may happen: ${jsonencode(aws_s3_bucket_lifecycle_configuration.this.rule)}"
  }

  # --- the policies, whole

  assert {
    condition = jsondecode(aws_s3_bucket_policy.this.policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "DenyWithoutTls"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:*"
          Resource  = ["arn:aws:s3:::cache/*", "arn:aws:s3:::cache"]
          Condition = { Bool = { "aws:SecureTransport" = "false" } }
        },
        {
          Sid       = "DenyOldTls"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:*"
          Resource  = ["arn:aws:s3:::cache/*", "arn:aws:s3:::cache"]
          Condition = { NumericLessThan = { "s3:TlsVersion" = "1.2" } }
        },
        {
          Sid       = "DenyWrongEncryption"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:PutObject"
          Resource  = "arn:aws:s3:::cache/*"
          Condition = {
            Null            = { "s3:x-amz-server-side-encryption" = "false" }
            StringNotEquals = { "s3:x-amz-server-side-encryption" = "AES256" }
          }
        },
        {
          Sid       = "DenyCustomerKeys"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:PutObject"
          Resource  = "arn:aws:s3:::cache/*"
          Condition = { Null = { "s3:x-amz-server-side-encryption-customer-algorithm" = "false" } }
        },
      ]
    }
    error_message = "bucket policy: ${aws_s3_bucket_policy.this.policy}"
  }

  assert {
    condition = jsondecode(aws_iam_policy.access["reader"].policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "List"
          Effect    = "Allow"
          Action    = "s3:ListBucket"
          Resource  = "arn:aws:s3:::cache"
          Condition = { StringLikeIfExists = { "s3:prefix" = "team/s3kv/*" } }
        },
        {
          Sid      = "Objects"
          Effect   = "Allow"
          Action   = "s3:GetObject"
          Resource = "arn:aws:s3:::cache/team/s3kv/*"
        },
      ]
    }
    error_message = "reader: ${aws_iam_policy.access["reader"].policy}"
  }

  assert {
    condition = jsondecode(aws_iam_policy.access["writer"].policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "List"
          Effect    = "Allow"
          Action    = "s3:ListBucket"
          Resource  = "arn:aws:s3:::cache"
          Condition = { StringLikeIfExists = { "s3:prefix" = "team/s3kv/*" } }
        },
        {
          Sid      = "Objects"
          Effect   = "Allow"
          Action   = ["s3:PutObject", "s3:GetObject"]
          Resource = "arn:aws:s3:::cache/team/s3kv/*"
        },
      ]
    }
    error_message = "writer: ${aws_iam_policy.access["writer"].policy}"
  }

  assert {
    condition     = keys(aws_iam_policy.access) == ["reader", "writer"]
    error_message = "there must be these two policies and no other"
  }

  # --- monitoring

  assert {
    condition     = aws_s3_bucket_metric.this[0].name == "EntireBucket" && length(aws_s3_bucket_metric.this[0].filter) == 0
    error_message = "request metrics must be on, and count every request"
  }

  assert {
    condition = jsonencode([for alarm in concat(aws_cloudwatch_metric_alarm.errors, aws_cloudwatch_metric_alarm.latency, aws_cloudwatch_metric_alarm.size) : {
      for name in setsubtract(keys(alarm), ["alarm_description", "arn", "evaluate_low_sample_count_percentiles", "id", "region", "tags_all"]) :
      name => alarm[name] if try(length(alarm[name]) > 0, alarm[name] != null)
      }]) == jsonencode([for alarm in [
      {
        alarm_name          = "cache-errors"
        metric_name         = "5xxErrors"
        dimensions          = { BucketName = "cache", FilterId = "EntireBucket" }
        statistic           = "Average"
        threshold           = 0.01
        period              = 300
        evaluation_periods  = 3
        datapoints_to_alarm = 2
        treat_missing_data  = "notBreaching"
      },
      {
        alarm_name          = "cache-latency"
        metric_name         = "FirstByteLatency"
        dimensions          = { BucketName = "cache", FilterId = "EntireBucket" }
        extended_statistic  = "p99"
        threshold           = 500
        period              = 300
        evaluation_periods  = 3
        datapoints_to_alarm = 3
        treat_missing_data  = "notBreaching"
      },
      {
        alarm_name         = "cache-size"
        metric_name        = "BucketSizeBytes"
        dimensions         = { BucketName = "cache", StorageType = "StandardStorage" }
        statistic          = "Average"
        threshold          = 107374182400
        period             = 86400
        evaluation_periods = 1
        treat_missing_data = "ignore"
      },
      ] : merge(alarm, {
        namespace           = "AWS/S3"
        comparison_operator = "GreaterThanThreshold"
        actions_enabled     = true
        alarm_actions       = ["arn:aws:sns:eu-west-1:111122223333:pager"]
        ok_actions          = ["arn:aws:sns:eu-west-1:111122223333:pager"]
        tags                = aws_s3_bucket.this[0].tags
    })])
    error_message = "the alarms must watch the errors, the latency and the size of this bucket, reach the pager, and say when it is over"
  }

  assert {
    condition = [for widget in jsondecode(aws_cloudwatch_dashboard.this[0].dashboard_body).widgets : join(" ", [for metric in widget.properties.metrics : metric[1]])] == [
      "GetRequests PutRequests HeadRequests ListRequests DeleteRequests",
      "5xxErrors 4xxErrors",
      "FirstByteLatency",
      "BytesDownloaded BytesUploaded",
      "BucketSizeBytes",
      "NumberOfObjects",
    ]
    error_message = "the dashboard must have its six widgets"
  }

  # --- what vLLM is given

  assert {
    condition = jsondecode(output.kv_transfer_config) == {
      kv_connector              = "S3KVConnector"
      kv_connector_module_path  = "s3kv.connectors"
      kv_role                   = "kv_both"
      kv_connector_extra_config = { bucket = "cache", prefix = "team/s3kv", region = "eu-west-1", refresh_after_s = 151200 }
    }
    error_message = "kv_transfer_config: ${output.kv_transfer_config}"
  }

  assert {
    condition = jsondecode(output.ec_transfer_config) == {
      ec_connector              = "S3ECConnector"
      ec_connector_module_path  = "s3kv.connectors"
      ec_role                   = "ec_both"
      ec_connector_extra_config = { bucket = "cache", prefix = "team/s3kv", region = "eu-west-1", refresh_after_s = 151200 }
    }
    error_message = "ec_transfer_config: ${output.ec_transfer_config}"
  }

  assert {
    condition     = jsondecode(output.reader_kv_transfer_config).kv_role == "kv_consumer" && jsondecode(output.reader_ec_transfer_config).ec_role == "ec_consumer"
    error_message = "a reader's engine must not try to save"
  }

  assert {
    condition     = jsondecode(output.reader_kv_transfer_config).kv_connector_extra_config == { bucket = "cache", prefix = "team/s3kv", region = "eu-west-1" } && jsondecode(output.reader_ec_transfer_config).ec_connector_extra_config == { bucket = "cache", prefix = "team/s3kv", region = "eu-west-1" }
    error_message = "a reader's engine must not try to refresh what it may not write"
  }

  assert {
    condition = {
      reader = output.reader_policy_arn
      writer = output.writer_policy_arn
      } == {
      reader = aws_iam_policy.access["reader"].arn
      writer = aws_iam_policy.access["writer"].arn
    }
    error_message = "the policies must be told by what they allow"
  }
}
