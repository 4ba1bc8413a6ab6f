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

# In a partition other than "aws", names of services end differently as well.
provider "aws" {
  alias                       = "china"
  region                      = "cn-north-1"
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

override_resource {
  target          = aws_iam_policy.access["cleaner"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/cleaner" }
}

override_resource {
  target          = aws_iam_role.eks["engine"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:role/engine" }
}

# Nothing is asked for: null is what a caller passes on who has not set it.
run "bare" {
  command = plan

  variables {
    name                     = "cache"
    storage                  = null
    availability_zone_id     = null
    prefix                   = null
    expiration_days          = null
    kms_key_arn              = null
    encryption_key           = null
    tags                     = null
    pod_identities           = null
    irsa                     = null
    permissions_boundary_arn = null
    gateway_endpoint         = null
    alarm_actions            = null
    max_error_percent        = null
    settings                 = null
    request_metrics          = false
    dashboard                = false
    force_destroy            = false
  }

  assert {
    condition = length(concat(
      aws_s3_bucket_metric.this,
      aws_cloudwatch_metric_alarm.errors,
      aws_cloudwatch_metric_alarm.latency,
      aws_cloudwatch_metric_alarm.size,
      aws_cloudwatch_dashboard.this,
      aws_vpc_endpoint.this,
      values(aws_iam_role.eks),
      aws_kms_key.data_keys,
      aws_kms_alias.data_keys,
      aws_iam_policy.data_keys,
    )) == 0
    error_message = "what is not asked for must not be made"
  }

  assert {
    condition     = aws_s3_bucket.this[0].force_destroy == false
    error_message = "force_destroy must be the caller's to turn off"
  }

  assert {
    condition     = jsondecode(aws_iam_policy.access["writer"].policy).Statement[1].Resource == "arn:aws:s3:::cache/s3kv/*"
    error_message = "the default prefix must be that of s3kv"
  }

  assert {
    condition     = output.cleaner_policy_arn == null && output.encryption_key_arn == null && output.encryption_key_alias == null && output.data_keys_policy_arn == null
    error_message = "nobody must be allowed to delete, or have a key, unless the caller says so"
  }
}

# The engines keep the bucket.
run "kept" {
  command = plan

  variables {
    name        = "cache"
    kms_key_arn = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
    cleaner     = true
    settings = {
      host_bytes      = "32GiB"
      drain_timeout_s = 7.5
      refresh_after_s = 3600
      bucket_bytes    = "10TiB"
      bucket_idle_s   = 86400
      verify_tls      = false
    }
    pod_identities = {
      engine = { cluster_name = "gpu", namespace = "inference", service_account = "vllm", access = "cleaner" }
    }
  }

  assert {
    condition = jsondecode(aws_iam_policy.access["cleaner"].policy).Statement[1] == {
      Sid      = "Objects"
      Effect   = "Allow"
      Action   = ["s3:PutObject", "s3:GetObject", "s3:DeleteObject"]
      Resource = "arn:aws:s3:::cache/s3kv/*"
    }
    error_message = "cleaner: ${aws_iam_policy.access["cleaner"].policy}"
  }

  assert {
    condition = [
      for place in [0, 2] : jsondecode(aws_iam_policy.access["cleaner"].policy).Statement[place]
      ] == [
      for place in [0, 2] : jsondecode(aws_iam_policy.access["writer"].policy).Statement[place]
    ]
    error_message = "a cleaner must list and encrypt as a writer does"
  }

  assert {
    condition     = !strcontains(aws_iam_policy.access["writer"].policy, "Delete") && !strcontains(aws_iam_policy.access["reader"].policy, "Delete")
    error_message = "others must not be able to delete, either"
  }

  assert {
    condition     = [output.cleaner_policy_arn, aws_iam_role_policy_attachment.eks["engine"].policy_arn] == [aws_iam_policy.access["cleaner"].arn, aws_iam_policy.access["cleaner"].arn]
    error_message = "the engine's role must have the policy"
  }

  assert {
    condition = [for told in [jsondecode(output.kv_transfer_config).kv_connector_extra_config, jsondecode(output.ec_transfer_config).ec_connector_extra_config] : told if told != merge({ bucket = "cache", prefix = "s3kv", region = "eu-west-1" }, {
      host_bytes      = "32GiB"
      drain_timeout_s = 7.5
      refresh_after_s = 3600
      bucket_bytes    = "10TiB"
      bucket_idle_s   = 86400
      verify_tls      = false
    })] == []
    error_message = "writers must be told the bucket and the caller's settings: ${output.kv_transfer_config}"
  }

  assert {
    condition = [for told in [jsondecode(output.reader_kv_transfer_config).kv_connector_extra_config, jsondecode(output.reader_ec_transfer_config).ec_connector_extra_config] : told if told != merge({ bucket = "cache", prefix = "s3kv", region = "eu-west-1" }, {
      host_bytes      = "32GiB"
      drain_timeout_s = 7.5
      verify_tls      = false
    })] == []
    error_message = "readers must be told the same, without what they may not do: ${output.reader_kv_transfer_config}"
  }
}

# Everything that has a default is set to something else.
run "tuned" {
  command = plan

  variables {
    name                      = "cache"
    expiration_days           = 30
    tags                      = { Application = "chat", DataClass = "internal" }
    max_error_percent         = 5
    max_first_byte_latency_ms = 800
    pod_identities = {
      engine = { cluster_name = "gpu", namespace = "inference", service_account = "vllm", access = "reader" }
    }
  }

  assert {
    condition     = [aws_cloudwatch_metric_alarm.errors[0].threshold, aws_cloudwatch_metric_alarm.latency[0].threshold] == [0.05, 800]
    error_message = "the alarms must go off at the caller's thresholds"
  }

  assert {
    condition     = aws_s3_bucket_lifecycle_configuration.this.rule[0].expiration[0].days == 30 && jsondecode(output.kv_transfer_config).kv_connector_extra_config.refresh_after_s == 648000
    error_message = "objects must expire when the caller says, and be written anew after a quarter of that"
  }

  assert {
    condition     = aws_s3_bucket.this[0].tags == tomap({ Application = "chat", ManagedBy = "terraform", DataClass = "internal" })
    error_message = "the caller's tags must win"
  }
}

run "china" {
  command = plan

  providers = {
    aws = aws.china
  }

  variables {
    name        = "cache"
    kms_key_arn = "arn:aws-cn:kms:cn-north-1:111122223333:key/11111111-2222-3333-4444-555555555555"
    pod_identities = {
      engine = { cluster_name = "gpu", namespace = "inference", service_account = "vllm" }
    }
    gateway_endpoint = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], extra_bucket_names = ["models"] }
  }

  assert {
    condition = length([
      for policy in [
        aws_s3_bucket_policy.this.policy,
        aws_iam_policy.access["reader"].policy,
        aws_iam_policy.access["writer"].policy,
        aws_iam_role.eks["engine"].assume_role_policy,
        aws_vpc_endpoint.this[0].policy,
      ] : policy if strcontains(policy, "arn:aws:")
    ]) == 0
    error_message = "every ARN must be one of the partition"
  }

  assert {
    condition     = jsondecode(aws_iam_policy.access["reader"].policy).Statement[2].Condition == { StringEquals = { "kms:ViaService" = "s3.cn-north-1.amazonaws.com.cn" } }
    error_message = "the key must be usable through the S3 of the partition"
  }
}
